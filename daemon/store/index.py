"""The index of a run directory in the store: its files, and the latest execution that owns it.

Content is uploaded first, under names that nothing refers to yet; then one conditional write of the
index makes it part of the run directory. So a checkpoint is complete or absent, and the
number of the execution in the index is a fencing token: an execution that begins
raises it, and the next commit of an earlier one is refused by the service itself.

Each write changes the content (`version`, `writer`), so that equal tags mean an equal history.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import orjson

from ...jobs.errors import Conflict, NotFound
from ...jobs.files import records
from ..runs.fence import Superseded
from .bucket import Bucket, Changed

SCHEMA = 1
NAME = "index.json"
_MAX_TRIES = 100  # of one commit, while other processes change the same index


@dataclass(frozen=True)
class StoredFile:
    """A file of a run directory in the store."""

    key: str  # of its content
    bytes: int
    xxh3_128: str

    @property
    def content(self) -> tuple[str, int]:
        """Digest and size, which are equal for equal files."""
        return self.xxh3_128, self.bytes


@dataclass(frozen=True)
class Index:
    """The state of a run directory in the store."""

    execution: int  # the latest that has claimed it
    files: Mapping[str, StoredFile]  # by relative path
    version: int

    def below(self, folder: str) -> dict[str, StoredFile]:
        """The files in a folder, by their paths within it."""
        start = f"{folder}/"
        return {n.removeprefix(start): f for n, f in self.files.items() if n.startswith(start)}

    def checkpoints(self) -> dict[int, str]:
        """The paths of the folders of all checkpoints, by step, oldest first."""
        found = {}
        for name in self.files:
            folder, _, rest = name.partition("/")
            number = rest.partition("/")[0].removeprefix("checkpoint-")
            if folder == "checkpoints" and number.isascii() and number.isdigit():
                found[int(number)] = f"checkpoints/checkpoint-{number}"
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class _Schema:
    schema: int


Change = Callable[[Index], Index]


def read(bucket: Bucket, job_id: str) -> Index:
    """Return the index of a job. Raises NotFound and Conflict."""
    content = bucket.get(f"{job_id}/{NAME}")
    if content is None:
        raise NotFound(f"job: no job {job_id!r} in {bucket.name}")
    return _parse(content.data, job_id)


def create(bucket: Bucket, job_id: str, files: Mapping[str, StoredFile]) -> None:
    """Write the index of a new job."""
    try:
        bucket.put_if(f"{job_id}/{NAME}", _serialize(Index(0, files, version=1)), None)
    except Changed:
        # A retry of a request whose reply came too late finds the index that the first one wrote.
        if dict(read(bucket, job_id).files) != dict(files):
            raise Conflict(f"job: {job_id} is already in {bucket.name}") from None


def commit(
    bucket: Bucket, job_id: str, change: Change, *, execution: int | None = None
) -> tuple[Index, Index]:
    """Change the index; return the old and the new one.

    `change` is called again when another process was faster. `execution`: the one that writes;
    None: a user's command. Raises Superseded if a later execution has claimed the run directory, or
    if it was removed; NotFound for a user's command.
    """
    key = f"{job_id}/{NAME}"
    for _ in range(_MAX_TRIES):
        content = bucket.get(key)
        if content is None:
            if execution is None:
                raise NotFound(f"job: no job {job_id!r} in {bucket.name}")
            raise Superseded(f"job: {job_id} was removed from {bucket.name}")
        old = _parse(content.data, job_id)
        if execution is not None and old.execution > execution:
            raise Superseded(
                f"job: execution {execution} of {job_id} was superseded by execution "
                f"{old.execution}: it commits nothing more to {bucket.name}"
            )
        new = change(old)
        if new == old:
            return old, old
        new = replace(new, version=old.version + 1)
        try:
            bucket.put_if(key, _serialize(new), content.tag)
        except Changed:
            continue
        return old, new
    raise Conflict(f"job: the index of {job_id} is changed by too many others: try again")


def claim(bucket: Bucket, job_id: str, execution: int) -> tuple[Index, Index]:
    """Raise the fence to an execution that begins; return the index before and after.

    Raises Superseded.
    """
    return commit(
        bucket, job_id, lambda old: replace(old, execution=execution), execution=execution
    )


def unused(old: Index, new: Index) -> list[str]:
    """Return the keys of content that only the old index refers to."""
    used = {file.key for file in new.files.values()}
    return sorted({file.key for file in old.files.values()} - used)


def _serialize(index: Index) -> bytes:
    document = {
        "schema": SCHEMA,
        "version": index.version,
        "writer": secrets.token_hex(8),
        "execution": index.execution,
        "files": index.files,
    }
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


def _parse(content: bytes, job_id: str) -> Index:
    try:
        document = orjson.loads(content)
        if records.convert(document, _Schema).schema > SCHEMA:
            raise Conflict(f"job: {job_id} was stored by a later warmd: upgrade warmd")
        return records.convert(document, Index)
    except ValueError as error:
        raise Conflict(f"job: the index of {job_id} in the run store is damaged: {error}") from None
