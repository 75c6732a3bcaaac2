"""Power failures: a disk that loses what was not flushed to it.

The disk is an ext4 file system in a file. Its shutdown drops what is not on the disk yet, as a
failing power supply does; files and folders come back as the disk has them.
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
        command = ["mount", "-o", "loop", str(self._image), str(self.folder)]
        return not subprocess.run(command, capture_output=True).returncode

    def lose_power(self) -> None:
        """Drop what is not on the disk; nothing can be written any more."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NOLOGFLUSH))
        finally:
            os.close(descriptor)

    def come_back(self) -> None:
        """Mount it again. No process may use it any more.

        A mount namespace that another test has made meanwhile keeps the dead file system alive
        until it ends.
        """
        wait_until(self._is_back)

    def _is_back(self) -> bool:
        subprocess.run(["umount", str(self.folder)], check=True)
        assert self.mount()
        try:
            (self.folder / "probe").touch()
            (self.folder / "probe").unlink()
        except OSError:
            return False
        return True


@contextlib.contextmanager
def disk_without_power(folder: Path, image: Path, *, megabytes: int = 200) -> Iterator[Disk]:
    """Mount a new disk on a folder, which must be empty."""
    has_tools = shutil.which("mkfs.ext4") and shutil.which("mount")
    needs(has_tools, "mkfs.ext4")
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    disk = Disk(image, folder)
    needs(disk.mount(), "the right to mount a file system in a file")
    folder.chmod(0o700)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
