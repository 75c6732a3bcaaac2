"""Packages of job kinds, installed into a folder as pip would do it: modules and metadata."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from warmd.jobs import KINDS

EXAMPLE = Path(__file__).parents[1] / "outside" / "lines" / "warmd_lines"


def install(folder: Path, name: str, kinds: Mapping[str, str]) -> Path:
    """Write the metadata of a package that declares kinds: name -> module:Spec. Return `folder`."""
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{kind} = {value}" for kind, value in kinds.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[warmd.kinds]", *lines, ""]))
    return folder


def install_example(folder: Path) -> Path:
    """Install the example of the manual, the kind `lines`. Return `folder`."""
    shutil.copytree(EXAMPLE, folder / EXAMPLE.name, ignore=shutil.ignore_patterns("__pycache__"))
    return install(folder, "warmd-lines", {"lines": "warmd_lines.options:LinesSpec"})


def look_again() -> None:
    """Make this process read the kinds again, like a new process."""
    KINDS.__dict__.pop("_found", None)
    for name in [name for name in sys.modules if name.startswith(("warmd_lines", "odd_kind"))]:
        del sys.modules[name]
