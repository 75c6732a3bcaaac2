"""Power failures: a disk that loses what was not flushed to it.

The disk is an ext4 file system in a file. Its shutdown drops what is not on the disk yet, as a
failing power supply does; files and folders come back as the disk has them. It can also become
read-only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from needs import needs
from waiting import wait_until

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_NOLOGFLUSH = 2  # without flushing the journal


class Disk:
    """A disk that is mounted on `folder`."""

    def __init__(self, image: Path, folder: Path) -> None:
        self.folder = folder
        self._image = image

    def mount(self) -> bool:
        """Mount it; False if that is not possible here."""
        found = _run("losetup", "--find", "--show", str(self._image))
        device = found.stdout.strip()
        mounts = not found.returncode and not _run("mount", device, str(self.folder)).returncode
        # The kernel detaches it when it is unmounted, also by the end of a killed test's namespace.
        _run("losetup", "--detach", device)
        return mounts

    def unmount(self, *options: str) -> None:
        # A killed process is a zombie before the last of its threads has closed its files.
        wait_until(lambda: not _run("umount", *options, str(self.folder)).returncode)

    def lose_power(self) -> None:
        """Drop what is not on the disk; from now on every access is an I/O error (EIO)."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NOLOGFLUSH))
        finally:
            os.close(descriptor)

    def become_read_only(self) -> None:
        """Refuse every write (EROFS), as the file system does after an error in its journal."""
        assert not _run("mount", "-o", "remount,abort", str(self.folder)).returncode

    def come_back(self) -> None:
        """Mount it again. No process may use it any more.

        By a new device: a mount namespace that another test has made meanwhile keeps the dead file
        system on the old one alive.
        """
        self.unmount()
        assert self.mount()


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


@contextlib.contextmanager
def disk_without_power(folder: Path, image: Path, *, megabytes: int = 200) -> Iterator[Disk]:
    """Mount a new disk on a folder, which must be empty."""
    needs(all(map(shutil.which, ("mkfs.ext4", "mount", "losetup"))), "mkfs.ext4 and losetup")
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    # Without a reserve for root, which could otherwise write to the full disk.
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    disk = Disk(image, folder)
    needs(disk.mount(), "the right to mount a file system in a file")
    folder.chmod(0o700)
    try:
        yield disk
    finally:
        disk.unmount("-l")
