"""The top level of the repository has what the documented layout has, and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {".ci", "cli", "configs", "daemon", "deploy", "docs", "jobs", "src", "tests"}
FILES = {
    ".dockerignore",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
}


def test_nothing_else_is_committed_at_the_top_level():
    if not (ROOT / ".git").exists():
        # An unpacked archive: there are no commits, and its packer may have added files.
        pytest.skip("not a git checkout")
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {Path(name).parts[0] for name in listed.split("\0") if name} == FOLDERS | FILES
