"""Disks that are soon full: real file systems in memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from needs import needs


@contextlib.contextmanager
def small_disk(folder: Path, size: str, *, inodes: int = 0) -> Iterator[Path]:
    """Mount a tmpfs of a size such as "64k" on a folder, whose own content is hidden meanwhile.

    `inodes`: how many files it has room for; 0: as many as fit.
    """
    options = f"size={size},nr_inodes={inodes},mode=700"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    mounts = shutil.which("mount") and not subprocess.run(command, capture_output=True).returncode
    needs(mounts, "the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


FILLER = "filler"


def fill(disk: Path, *, leave_bytes: int = 0) -> None:
    """Write a file that takes all space of a disk but for some bytes."""
    space = os.statvfs(disk)
    (disk / FILLER).write_bytes(bytes(space.f_bavail * space.f_frsize - leave_bytes))


def fill_inodes(disk: Path) -> None:
    """Create files until the disk has no room for another one."""
    (disk / FILLER).mkdir()
    for number in range(os.statvfs(disk).f_favail):
        (disk / FILLER / str(number)).touch()


def make_room(disk: Path) -> None:
    """Remove what `fill` or `fill_inodes` has left."""
    filler = disk / FILLER
    shutil.rmtree(filler) if filler.is_dir() else filler.unlink()


@contextlib.contextmanager
def read_only(folder: Path, at: Path) -> Iterator[Path]:
    """Show a folder at another place, where nothing can be written."""
    bind = ["mount", "--bind", str(folder), str(at)]
    mounts = shutil.which("mount") and not subprocess.run(bind, capture_output=True).returncode
    needs(mounts, "the right to bind a folder to another place")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(at)], check=True)
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)
