"""Training files of the HTTP API, in the folder `files` of the home.

An uploaded file is `files/ID/NAME`. A request may also name other files in that folder by their
relative path, and no file outside it.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel

from ....jobs.errors import SpecError
from ....jobs.files.atomic import recover, whole_folder
from ...host.home import Home, private
from ..http.errors import ApiError

log = logging.getLogger(__name__)

PURPOSE: Literal["fine-tune"] = "fine-tune"
_ID = re.compile(r"file-[0-9a-f]{24}", re.ASCII)


class FileObject(BaseModel):
    """An uploaded file, or the result file of a job."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["fine-tune", "fine-tune-results"] = PURPOSE
    status: Literal["processed"] = "processed"


class FileStore:
    """The uploaded files of one home. Every method blocks on disk: call it in a thread."""

    def __init__(self, home: Home, *, max_bytes: int, keep_s: float | None) -> None:
        """`max_bytes` of all files together; `keep_s` after a file's last use (None: forever)."""
        self.folder = home.path / "files"
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._counting = threading.Lock()
        self._stored = 0  # bytes
        self._arriving: dict[str, int] = {}  # bytes so far, by id

    def begin(self, filename: str) -> Incoming:
        """Begin an upload. Raises ApiError 507."""
        return Incoming(self, filename)

    def clean(self) -> None:
        """Remove incomplete uploads of processes that were killed."""
        recover(self.folder)

    def check_room(self, size: int) -> None:
        """Raise ApiError 507 when `size` more bytes than the stored ones exceed the limit."""
        self._remove_old()
        with self._counting:
            self._stored = self._count_stored()
            self._check(size)

    def count(self, file_id: str, size: int) -> None:
        """Count bytes of an upload before they are written. Raises ApiError 507."""
        with self._counting:
            arriving = sum(self._arriving.values()) + size
            if self._stored + arriving > self._max_bytes:
                self._stored = self._count_stored()  # some may have been deleted
            self._check(arriving)
            self._arriving[file_id] = self._arriving.get(file_id, 0) + size

    def end(self, file_id: str, *, is_stored: bool) -> None:
        """Count a file as stored, or no more."""
        with self._counting:
            size = self._arriving.pop(file_id, 0)
            self._stored += size if is_stored else 0

    def _check(self, size: int) -> None:
        if self._stored + size > self._max_bytes:
            raise ApiError(
                507,
                f"file: all files together must have at most {self._max_bytes:,} bytes "
                f"(max_uploads), got {size:,} more than the stored {self._stored:,}: delete files "
                "first",
            )

    def total_bytes(self) -> int:
        """Return the size of all uploaded files."""
        return sum(file.bytes for file in self.all())

    def _count_stored(self) -> int:
        return sum(file.bytes for file in self.all() if file.id not in self._arriving)

    def _remove_old(self) -> None:
        if self._keep_s is None:
            return
        for folder in self.folder.glob("file-*"):
            with suppress(FileNotFoundError):
                if _is_id(folder.name) and time.time() - folder.stat().st_mtime > self._keep_s:
                    log.info(
                        "%s: removed: not used for %g s (keep_uploads)", folder.name, self._keep_s
                    )
                    shutil.rmtree(folder)

    def get(self, file_id: str) -> FileObject:
        """Describe a file. Raises ApiError 404."""
        path = self.path(file_id)
        try:
            found = path.stat()
        except FileNotFoundError:
            raise _unknown(file_id) from None
        return FileObject(
            id=file_id, bytes=found.st_size, created_at=int(found.st_mtime), filename=path.name
        )

    def all(self) -> list[FileObject]:
        found = []
        for path in self.folder.glob("file-*"):
            with suppress(ApiError):  # being removed, or changed by hand
                found.append(self.get(path.name))
        return sorted(found, key=lambda file: (file.created_at, file.id), reverse=True)

    def path(self, file_id: str) -> Path:
        """Return where a file is. Raises ApiError 404."""
        inside = list((self.folder / file_id).iterdir()) if self._has(file_id) else []
        if len(inside) != 1:
            raise _unknown(file_id)
        return inside[0]

    def _has(self, file_id: str) -> bool:
        return _is_id(file_id) and (self.folder / file_id).is_dir()

    def remove(self, file_id: str) -> None:
        """Delete a file. Raises ApiError 404."""
        shutil.rmtree(self.path(file_id).parent)

    def locate(self, name: str, param: str) -> Path:
        """Return the path of a file id or relative path, and mark it used. Raises SpecError."""
        if self._has(name):
            path = self.path(name)
            os.utime(path.parent)  # `keep_s` counts from here
            return path
        inside = PurePosixPath(name)
        path = self.folder / inside
        if inside.is_absolute() or ".." in inside.parts or not _exists(path):
            raise SpecError(
                param,
                f"must be the id of an uploaded file, or a path below {self.folder}, "
                f"got {name[:80]!r}",
            )
        return path


class Incoming:
    """An upload in progress, written to a staging folder below `files`, which no list shows.

    Every method blocks on disk. `close` discards an upload that was not stored;
    `FileStore.clean` removes the uploads of a killed process.
    """

    def __init__(self, store: FileStore, filename: str) -> None:
        """Raises ApiError 507."""
        self.id = f"file-{secrets.token_hex(12)}"
        self._store = store
        name = re.sub(r"[^\w. -]", "_", PurePosixPath(filename).name, flags=re.ASCII)[:100]
        store.folder.mkdir(mode=0o700, exist_ok=True)
        with _full_disk_as_error(), ExitStack() as stack:
            staging = stack.enter_context(whole_folder(store.folder / self.id))
            self._file = stack.enter_context(open(staging / _named(name), "wb", opener=private))
            self._open = stack.pop_all()  # closing it closes the file and shows its folder

    def write(self, data: bytes) -> None:
        """Append bytes. Raises ApiError 507 beyond the limit of all files, or on a full disk."""
        self._store.count(self.id, len(data))
        with _full_disk_as_error():
            self._file.write(data)

    def keep(self) -> FileObject:
        """Store the file, durably. Raises ApiError 507."""
        with _full_disk_as_error():
            self._open.close()
        self._store.end(self.id, is_stored=True)
        return self._store.get(self.id)

    def close(self) -> None:
        """Discard the file unless it is stored."""
        unfinished = self._open.pop_all()
        with suppress(_Discarded, OSError), unfinished:
            raise _Discarded
        self._store.end(self.id, is_stored=False)


class _Discarded(Exception):
    """Ends the writing of a folder that is not to be kept."""


@contextmanager
def _full_disk_as_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ApiError(507, f"file: cannot be stored: {error.strerror}") from error


def _unknown(file_id: str) -> ApiError:
    return ApiError(404, f"file_id: no file {file_id[:80]!r}", param="file_id")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # not a valid file name
        return False


def _is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def _named(name: str) -> str:
    return name if name.strip(". ") else "data.jsonl"
