"""The data of training jobs that came over HTTP, in the home's folder `files`.

An uploaded file is `files/ID/NAME`. What the user puts into the folder can be named by its path
there; nothing above it can.
"""

from __future__ import annotations

import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal

from pydantic import BaseModel

from ...jobs.durable import whole_folder
from ...jobs.errors import SpecError
from ..home import Home
from .errors import ApiError

PURPOSE: Literal["fine-tune"] = "fine-tune"
_ID = re.compile(r"file-[0-9a-f]{24}", re.ASCII)


class FileObject(BaseModel):
    """An uploaded file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["fine-tune"] = PURPOSE
    status: Literal["processed"] = "processed"


class FileStore:
    """The files of one home. Every method works on the disk: call it in a thread."""

    def __init__(self, home: Home) -> None:
        self.folder = home.path / "files"

    def add(self, source: BinaryIO, filename: str) -> FileObject:
        """Keep a copy of what `source` holds, whole or not at all."""
        file_id = f"file-{secrets.token_hex(12)}"
        name = re.sub(r"[^\w. -]", "_", PurePosixPath(filename).name, flags=re.ASCII)[:100]
        self.folder.mkdir(mode=0o700, exist_ok=True)
        with (
            whole_folder(self.folder / file_id) as staging,
            open(staging / _named(name), "wb") as to,
        ):
            shutil.copyfileobj(source, to, 1 << 20)
        return self.get(file_id)

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
            with suppress(ApiError):  # being removed, or spoilt by hand
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
        """Forget a file. Raises ApiError 404."""
        shutil.rmtree(self.path(file_id).parent)

    def locate(self, name: str, param: str) -> Path:
        """Return what an id, or a path below the folder, means. Raises SpecError."""
        if self._has(name):
            return self.path(name)
        inside = PurePosixPath(name)
        path = self.folder / inside
        if inside.is_absolute() or ".." in inside.parts or not _exists(path):
            raise SpecError(
                param,
                f"must be the id of an uploaded file, or a path below {self.folder}, "
                f"got {name[:80]!r}",
            )
        return path


def _unknown(file_id: str) -> ApiError:
    return ApiError(404, f"no file {file_id[:80]!r} here", param="file_id")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def _named(name: str) -> str:
    return name if name.strip(". ") else "data.jsonl"
