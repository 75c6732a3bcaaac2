"""The event log of a job: `events.jsonl` is authoritative, the Redis stream is a copy.

Every event has `seq` (1, 2, … without gaps), `execution`, `time` (unix seconds), `type` and `step`.
Events up to a checkpoint are on the disk before it is. After a power failure the stream may be
ahead of the file: then the worker of the next execution writes back what the file has lost.

The horse writes while it lives; its worker writes before and after, and also while the horse hangs.
So each event is written under a lock on the file, which a hanging process does not hold.
"""

from __future__ import annotations

import fcntl
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Self

import orjson

from ...jobs.context import Patiently, at_once
from ...jobs.event_format import TERMINAL as TERMINAL, parse
from ...jobs.files.appending import append, sync
from ...jobs.files.atomic import fsync, naming
from ...jobs.files.shortage import lacks_space
from ...jobs.user_code.forks import end_if_forked

# The types after which no event follows for long, or from another process: flushed at once.
_ENDING = (*TERMINAL, "paused", "requeued")

_TAIL_BYTES = 1_000_000

# The types that follow from the step alone: computed again after a resume, they are the same again.
_ONCE_A_STEP = ("step", "divergence")


def read(path: Path, *, after: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the complete events with a `seq` above `after`; an incomplete last line is left out."""
    for event, _ in _complete(path):
        if event is not None and event["seq"] > after:
            yield event


def read_piece(path: Path, offset: int, after: int, size: int) -> tuple[list[dict[str, Any]], int]:
    """Return complete events with a `seq` above `after`, and the offset in the file behind them.

    They begin at a byte offset and are `size` bytes, or less at the end of the file; none: it has
    no more.
    """
    found = []
    for event, length in _complete(path, offset):
        offset += length
        if event is None or event["seq"] <= after:
            continue
        found.append(event)
        size -= length
        if size <= 0:
            break
    return found, offset


def _complete(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """Yield the event in each complete line from a byte offset on, and the line's length.

    None: the line is not an event.
    """
    if not path.is_file():
        return
    with open(path, "rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield parse(line), len(line)


def newest(path: Path, count: int) -> list[dict[str, Any]]:
    """Return up to this many of the newest complete events of the last megabyte, newest first."""
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        start = max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0)
        file.seek(start)
        lines = file.readlines()[1 if start else 0 :]  # the first line may be incomplete
    found = (event for line in reversed(lines) if (event := parse(line)) is not None)
    return list(islice(found, count))


def last_seq(path: Path) -> int:
    """Return the number of the newest event in a file; 0 without any."""
    return next((event["seq"] for event in newest(path, 1)), 0)


class EventLog:
    """Appends to `events.jsonl`. Opening it repairs the file after a killed writer."""

    def __init__(
        self,
        path: Path,
        *,
        execution: int,
        clock_offset_s: float = 0.0,
        publish: Callable[[dict[str, Any]], None] | None = None,
        patience_s: float | None = None,
        announce: Callable[[dict[str, Any]], None] | None = None,
        patiently: Patiently = at_once,
    ) -> None:
        """`clock_offset_s`: how far the clock of the events is ahead of this machine's.

        `patience_s`: how long to wait for another writer; None: as long as it takes. `announce`
        publishes an event that is not in the file yet: the disk is full. `patiently` repeats writes
        on a full disk.
        """
        self.execution = execution
        self._clock_offset_s = clock_offset_s
        self.publish = publish
        self.step: int | None = None
        self.seq = 0
        self._latest = dict.fromkeys(_ONCE_A_STEP, 0)  # highest step of each, of all executions
        self._announce = announce
        self._patiently = patiently
        self._unwritten: list[dict[str, Any]] = []  # announced, and not in the file yet
        self._path = path
        self._patience_s = patience_s
        self._owner = os.getpid()
        self._lock = threading.RLock()  # `announce` is called while `emit` waits for space
        self._is_entered = False  # whether the folder's entry of the file is durable
        self._size = 0  # bytes of whole events that are known here
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        try:
            with self._alone():
                pass
        except BaseException:
            self._file.close()
            raise

    @property
    def latest_step(self) -> int:
        """The highest step with an event."""
        return self._latest["step"]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude other writers, and read the events that they have written."""
        descriptor = self._file.fileno()
        try:
            self._wait_for_lock(descriptor)  # an interrupt may follow at once
            if os.fstat(descriptor).st_size != self._size:
                with naming(self._path):
                    self._read_on()
                    self._file.truncate(self._size)  # only the last line can be incomplete
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for copies in forked processes

    def _wait_for_lock(self, descriptor: int) -> None:
        if self._patience_s is None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def _read_on(self) -> None:
        with open(self._path, "rb") as written:
            self._size = min(self._size, os.fstat(written.fileno()).st_size)
            written.seek(self._size)
            for line in written:
                if line.endswith(b"\n"):
                    self._size += len(line)
                event = parse(line)
                if event is None:
                    continue
                self.seq = max(self.seq, event["seq"])
                self._note(event)

    def _note(self, event: dict[str, Any]) -> None:
        """Note the step of an event in the file."""
        if event["type"] in self._latest:
            latest = max(self._latest[event["type"]], event.get("step") or 0)
            self._latest[event["type"]] = latest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def emit(self, type: str, /, *, step: int | None = None, **fields: Any) -> None:
        """Append an event and publish it (jobs.context.Emit); from any thread.

        A `step` event that an earlier execution already logged is left out: after a resume from
        checkpoint 5 the steps up to the kill are computed again, with the same numbers, and a
        reader sees each step once. So is a `divergence`.
        """
        end_if_forked(self._owner, "to write an event")  # before the lock: a copy may be taken
        with self._lock:
            self._patiently(lambda: self._add(type, step, fields), self._path.parent)

    def conclude(self, type: str, /, *, step: int | None = None, **fields: Any) -> None:
        """Emit an event that ends the execution.

        It waits for space like `emit`. If the job is to stop meanwhile, the event is announced, and
        the next execution writes it to the file.
        """
        try:
            self.emit(type, step=step, **fields)
        except OSError as error:
            if self._announce is None or not lacks_space(error):
                raise
            self.announce(type, step=step, **fields)

    def announce(self, type: str, /, *, step: int | None = None, **fields: Any) -> None:
        """Emit an event without waiting for space; if the disk is full, `emit` writes it later."""
        with self._lock:
            with suppress(OSError), self._alone():
                pass  # for the number
            event = self._event(self.seq + len(self._unwritten) + 1, type, step, fields)
            self._unwritten.append(event)
            try:
                with self._alone():
                    self._write_announced()
            except OSError:
                if self._announce is not None:
                    self._announce(event)
            else:
                if self.publish is not None:
                    self.publish(event)

    def restore(self, events: Iterable[dict[str, Any]]) -> None:
        """Append events that were published before, and that the file has lost. Raises OSError."""
        with self._lock, self._alone():
            for event in events:
                if event["seq"] > self.seq:
                    self._write(event)
                    self._note(event)

    def sync(self) -> None:
        """Make all events so far survive a power failure; from any thread."""
        sync(self._file.fileno(), self._path)
        self._sync_entry()

    def _sync_entry(self) -> None:
        """Flush the file's entry in its folder to the disk, once."""
        if not self._is_entered:
            fsync(self._path.parent)
            self._is_entered = True

    def continue_after(self, seq: int) -> None:
        """Give the next event a higher number than `seq`, the number of an event that is lost."""
        with self._lock, self._alone():
            self.seq = max(self.seq, seq)

    def _add(self, type: str, step: int | None, fields: dict[str, Any]) -> None:
        """Write and publish an event, unless an earlier execution has written it."""
        with self._alone():
            self._write_announced()
            if step is not None and step <= self._latest.get(type, -1):
                self.step = max(step, self.step or 0)
                return
            event = self._event(self.seq + 1, type, step, fields)
            self._write(event, is_durable=type in _ENDING)
            self._note(event)
        if self.publish is not None:
            self.publish(event)

    def _write_announced(self) -> None:
        while self._unwritten:
            self._write({**self._unwritten[0], "seq": self.seq + 1})
            self._note(self._unwritten.pop(0))

    def _event(
        self, seq: int, type: str, step: int | None, fields: dict[str, Any]
    ) -> dict[str, Any]:
        if step is not None:
            # The event of a written checkpoint comes some steps after the step of the checkpoint.
            self.step = max(step, self.step or 0)
        return {
            "seq": seq,
            "execution": self.execution,
            # Microseconds, as steps of a small model can be less than a millisecond apart.
            "time": round(time.time() + self._clock_offset_s, 6),
            "type": type,
            "step": self.step if step is None else step,
            **_plain(fields),
        }

    def _write(self, event: dict[str, Any], *, is_durable: bool = False) -> None:
        line = orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE)
        if is_durable:
            self._sync_entry()
        append(self._file.fileno(), line, self._path, is_durable=is_durable)
        self.seq = event["seq"]
        self._size += len(line)


def _plain(value: Any) -> Any:
    # orjson writes NaN as null by itself; text may hold lone surrogates from a tokenizer.
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Path):
        return str(value)
    return value.item() if hasattr(value, "item") else str(value)
