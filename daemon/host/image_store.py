"""Images of chat requests, each stored once, however many jobs use it.

RUNS/.images/SHA256 is an image, named by its content, as specs name it. The run directory of a job
that names it has a hard link to it, images/SHA256. The link count of the file system is the number
of jobs that need an image, so no process that dies can leave a wrong count: an image with one link
is not needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...jobs.files.atomic import LOCK, locked, write_atomic

_LINKS = "images"  # in a run directory


class ImageStore:
    """The images of the jobs in one folder of run directories."""

    def __init__(self, runs: Path) -> None:
        # The resolved path, which other machines that share the folder have too, not this home's
        # link.
        self.folder = runs.resolve() / ".images"

    def place_of(self, content: bytes) -> Path:
        """Return where an image is stored, or would be."""
        return self.folder / hashlib.sha256(content).hexdigest()

    def hold(self, rundir: Path, images: Mapping[Path, bytes]) -> None:
        """Store images by their places, and keep them for as long as a run directory exists.

        Raises OSError, also where the file system has no hard links.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        (rundir / _LINKS).mkdir(mode=0o700)
        with locked(self.folder, fcntl.LOCK_SH):  # nothing is swept meanwhile
            for place, content in images.items():
                if not place.exists():
                    write_atomic(place, content)
                os.link(place, rundir / _LINKS / place.name)

    def sweep(self) -> None:
        """Remove the images that no run directory needs any more."""
        # Nothing was ever stored, or a request is storing an image: a later sweep does it.
        with (
            contextlib.suppress(FileNotFoundError, BlockingIOError),
            locked(self.folder, fcntl.LOCK_EX | fcntl.LOCK_NB),
        ):
            for image in self._unneeded():
                os.unlink(image.path)

    def _unneeded(self) -> Iterator[os.DirEntry[str]]:
        for image in os.scandir(self.folder):
            # No image is stored without a link at this point: both are done under the lock.
            if image.name != LOCK and image.stat(follow_symlinks=False).st_nlink == 1:
                yield image


def size_of(rundir: Path) -> int:
    """Return the bytes that a job's files take, with its share of shared images."""
    size = 0
    for folder, _, names in os.walk(rundir):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = os.lstat(os.path.join(folder, name))
                size += found.st_size // max(1, found.st_nlink - 1)
    return size
