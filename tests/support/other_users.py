"""Another user of the machine, by setpriv: needs root, and programs that every user may run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from needs import needs

OTHER = 54321  # a user and a group that no account has


def another_user() -> None:
    """Skip the test where this process cannot act as another user."""
    needs(os.geteuid() == 0 and shutil.which("setpriv"), "root and setpriv")


def as_other(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as the other user."""
    return subprocess.run(
        ["setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups", *command],
        capture_output=True,
        text=True,
        cwd="/",
    )


def open_to_others(root: Path) -> dict[str, str]:
    """The modes of all files and folders below a folder that others may use, by path."""
    found = {}
    for path in (root, *root.rglob("*")):
        mode = path.lstat().st_mode
        if mode & 0o077 and not path.is_symlink():
            found[str(path.relative_to(root))] = f"{mode & 0o7777:04o}"
    return found
