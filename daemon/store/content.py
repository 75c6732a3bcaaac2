"""Uploading and downloading the content of single files, verified by checksum."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import xxhash

from ...jobs.errors import Conflict
from ...jobs.files.atomic import whole_file
from .bucket import PART_BYTES, Bucket
from .index import StoredFile

_BLOCK_BYTES = 1 << 20

OnBytes = Callable[[int], None]


class Transfer:
    """Uploads the content of the files of one execution.

    `known`: files whose content is in the store, so that equal ones are not uploaded again.
    """

    def __init__(self, bucket: Bucket, job_id: str, execution: int) -> None:
        self._bucket = bucket
        self._folder = f"{job_id}/data/{execution:06d}"

    def upload(
        self, path: Path, known: Mapping[tuple[str, int], StoredFile], *, digest: str | None = None
    ) -> StoredFile:
        """Upload a file unless its content is there; return it.

        `digest`: the file's, if known. A file that grows is uploaded with its present length.
        Raises OSError.
        """
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if digest is None:
                digest = _digest(_blocks(file.fileno(), size))
            if (same := known.get((digest, size))) is not None:
                return same
            key = f"{self._folder}-{secrets.token_hex(8)}"
            checksum = xxhash.xxh3_128()
            blocks = _counted(_blocks(file.fileno(), size), checksum)
            if size <= PART_BYTES:
                content = b"".join(blocks)
                size = len(content)
                self._bucket.put(key, content)
            else:
                self._bucket.put_blocks(key, blocks)
        return StoredFile(key, size, checksum.hexdigest())


def download(
    bucket: Bucket, file: StoredFile, target: Path, *, on_bytes: OnBytes = lambda number: None
) -> None:
    """Write a file's content to `target`, atomically.

    Raises Conflict if it is not as uploaded, and NotFound.
    """
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    checksum, size = xxhash.xxh3_128(), 0
    with whole_file(target, mode=0o600) as local:
        for block in bucket.read(file.key, file.bytes):
            checksum.update(block)
            size += len(block)
            local.write(block)
            on_bytes(len(block))
        if (checksum.hexdigest(), size) != file.content:
            raise Conflict(f"run store: {file.key} in {bucket.name} does not match its checksum")


def is_same(path: Path, file: StoredFile) -> bool:
    """Whether a local file has this content."""
    try:
        with open(path, "rb", buffering=0) as local:
            size = os.fstat(local.fileno()).st_size
            return size == file.bytes and _digest(_blocks(local.fileno(), size)) == file.xxh3_128
    except OSError:
        return False


def is_safe(name: str) -> bool:
    """Whether a path in an index stays within its run directory."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.parts != ()


def _blocks(descriptor: int, size: int) -> Iterator[bytes]:
    """Yield the first `size` bytes of a file, or fewer if it was truncated."""
    offset = 0
    while offset < size and (
        block := os.pread(descriptor, min(_BLOCK_BYTES, size - offset), offset)
    ):
        offset += len(block)
        yield block


def _counted(blocks: Iterator[bytes], checksum: xxhash.xxh3_128) -> Iterator[bytes]:
    for block in blocks:
        checksum.update(block)
        yield block


def _digest(blocks: Iterator[bytes]) -> str:
    checksum = xxhash.xxh3_128()
    for block in blocks:
        checksum.update(block)
    return checksum.hexdigest()
