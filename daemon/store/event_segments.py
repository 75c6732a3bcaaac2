"""The event log of a job in the store: segments, as an object cannot be appended to.

A segment is named by the execution that wrote it and by its offset in the log. The latest one of
an execution is written again while it grows. A segment of a later execution replaces
everything that earlier ones have from its offset on: later uploads of a superseded writer are not
part of the log.

An object has the checksum of its content in its metadata, as it is written without the index.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from ...jobs.errors import Conflict
from ...jobs.files.atomic import whole_file
from .bucket import Bucket

_SEGMENT_BYTES = 1 << 18  # from this size on, a segment is not written again
_NAME = re.compile(r".*/events/(\d+)-(\d+)\.jsonl")


@dataclass(frozen=True)
class Segment:
    """Bytes of the log that an object holds."""

    key: str
    execution: int
    offset: int
    bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.bytes


def segments(bucket: Bucket, job_id: str) -> list[Segment]:
    """Return the segments of the log, in order, without replaced parts. Raises Conflict."""
    log: list[Segment] = []
    for segment in _found(bucket, job_id):
        log = [
            replace(one, bytes=min(one.bytes, segment.offset - one.offset))
            for one in log
            if one.offset < segment.offset
        ]
        if segment.offset != (log[-1].end if log else 0):
            raise Conflict(f"job: a part of the events of {job_id} is missing in {bucket.name}")
        log.append(segment)
    return log


def length(log: list[Segment]) -> int:
    """Return the bytes of a log."""
    return log[-1].end if log else 0


def download(bucket: Bucket, log: list[Segment], path: Path) -> str | None:
    """Write a log to `path`, atomically; return which part of it was damaged in the store, if any.

    Damage does not prevent a resume, which needs only checkpoints: an unreadable event is left out
    by all readers. Segments of an earlier warmd have no checksum. Raises Conflict for a part that
    is missing.
    """
    problem = None
    with whole_file(path, mode=0o600) as file:
        for segment in log:
            content = bucket.get(segment.key)
            data = b"" if content is None else content.data
            if content is not None and content.checksum not in (None, _checksum(data)):
                problem = (
                    f"run store: {segment.key} in {bucket.name} does not match its checksum: "
                    f"events {segment.offset} to {segment.end} bytes into the log may be wrong"
                )
            data = data[: segment.bytes]
            if len(data) < segment.bytes:
                raise Conflict(f"run store: {segment.key} in {bucket.name} is cut off")
            file.write(data)
    return problem


def _checksum(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


class EventUpload:
    """Uploads the events of one execution."""

    def __init__(
        self, bucket: Bucket, job_id: str, path: Path, *, execution: int, start: int
    ) -> None:
        """`start`: the length of the log in the store when the execution began."""
        self._bucket = bucket
        self._path = path
        self._folder = f"{job_id}/events"
        self._execution = execution
        own = [one for one in _found(bucket, job_id) if one.execution == execution]
        # Uploaded by another process for this execution, before it was killed.
        self._offset = own[-1].offset if own else start
        self._sent = own[-1].end if own else start

    def upload(self) -> None:
        """Upload the whole events that are not in the store. Raises OSError."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            size = os.fstat(descriptor).st_size
            data = os.pread(descriptor, max(size - self._offset, 0), self._offset)
        finally:
            os.close(descriptor)
        data = data[: data.rfind(b"\n") + 1]
        if self._offset + len(data) <= self._sent:
            return
        name = f"{self._execution:06d}-{self._offset:015d}.jsonl"
        self._bucket.put(f"{self._folder}/{name}", data, checksum=_checksum(data))
        self._sent = self._offset + len(data)
        if len(data) >= _SEGMENT_BYTES:
            self._offset = self._sent


def _found(bucket: Bucket, job_id: str) -> list[Segment]:
    found = []
    for key, size in bucket.sizes(f"{job_id}/events").items():
        if match := _NAME.fullmatch(key):
            found.append(Segment(key, int(match[1]), int(match[2]), size))
    return sorted(found, key=lambda one: (one.execution, one.offset))
