"""Disks that are soon full, and quotas: real file systems, in memory or in a file."""

from __future__ import annotations

import contextlib
import errno
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


@contextlib.contextmanager
def quota(folder: Path, image: Path, limit: str) -> Iterator[Path]:
    """Mount a disk on a folder, with a quota such as "6M" for all files on it.

    A Btrfs, whose quotas need no module of the kernel. `image`: the file for it.
    """
    tools = all(map(shutil.which, ("mkfs.btrfs", "btrfs", "mount", "losetup")))
    mounts = tools and _mount_btrfs(folder, image)
    needs(mounts, "btrfs-progs, and the right to mount a Btrfs in a file")
    try:
        for words in (["quota", "enable"], ["qgroup", "limit", limit]):
            subprocess.run(["btrfs", *words, str(folder)], check=True)
        folder.chmod(0o700)
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _mount_btrfs(folder: Path, image: Path) -> bool:
    with image.open("wb") as file:
        file.truncate(256 << 20)
    subprocess.run(["mkfs.btrfs", "-q", str(image)], check=True)
    command = ["mount", "-o", "loop,noatime", str(image), str(folder)]
    return not subprocess.run(command, capture_output=True).returncode


FILLER = "filler"


def fill(disk: Path, *, leave_bytes: int = 0) -> None:
    """Write a file that takes all space of a disk but for some bytes."""
    space = os.statvfs(disk)
    try:
        (disk / FILLER).write_bytes(bytes(space.f_bavail * space.f_frsize - leave_bytes))
    except OSError as error:
        if error.errno != errno.ENOSPC:  # else another process has taken some of it meanwhile
            raise


def use_up(disk: Path) -> None:
    """Write a file until the quota of a disk is used up."""
    with contextlib.suppress(OSError), open(disk / FILLER, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def fill_inodes(disk: Path) -> None:
    """Create files until the disk has no room for another one."""
    (disk / FILLER).mkdir()
    for number in range(os.statvfs(disk).f_favail):
        (disk / FILLER / str(number)).touch()


def make_room(disk: Path) -> None:
    """Remove what `fill`, `use_up` or `fill_inodes` has left."""
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
