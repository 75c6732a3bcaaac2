"""Disks that are soon full: real file systems in memory."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from needs import needs


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of a size such as "64k" on a folder, whose own content is hidden meanwhile."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounts = shutil.which("mount") and not subprocess.run(command, capture_output=True).returncode
    needs(mounts, "the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
