"""Virtual environments of their own, for clients and libraries that warmd does not depend on."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def environment(folder: Path, *packages: str, shares: bool = False) -> Path:
    """Make an environment in `folder` with these packages of today, and return its Python.

    `shares`: what it lacks of warmd's own packages comes from this environment.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    pip: list[Any] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if shares:
        sources = Path(sys.modules["warmd"].__path__[0]).parent
        (place,) = folder.glob("lib/python*/site-packages")
        (place / "shared.pth").write_text(f"{sources}\n{sysconfig.get_path('purelib')}\n")
        pip += ["--constraint", ROOT / "constraints.txt"]  # what is there stays as it is
    subprocess.run([*pip, *packages], check=True)
    return python
