"""Finds events that need a notification in the event files of training jobs, each once.

`HOME/notify.json` holds the time of the first start, before which nothing is notified, and for
each job the `seq` of the latest event that was handled. An event is marked after its delivery: a
process that is killed in between delivers it a second time, and none is lost.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from ...configs.queues import TRAIN
from ...jobs import KINDS, spec_class
from ...jobs.errors import Conflict
from ...jobs.event_format import parse
from ...jobs.files import records
from ...jobs.files.atomic import write_atomic
from ...jobs.ids import by_time, kind_of
from ..host.home import Home
from ..runs import labels
from ..runs.rundir import RunDir, job_ids
from .delivery import Notification


@dataclass(frozen=True)
class _Record:
    """The content of notify.json."""

    begun: float  # unix seconds of the first start
    handled: dict[str, int]  # job -> seq of its latest handled event


class Scanner:
    """The events of one home that have not been handled yet."""

    def __init__(self, home: Home, wanted: Collection[str]) -> None:
        """`wanted`: the types of events. Raises OSError if notify.json cannot be written."""
        self._home = home
        self._wanted = frozenset(wanted)
        self._offsets: dict[str, int] = {}  # bytes of whole events that were read, per job
        found = records.read(home.notified, _Record)
        self._record = _Record(time.time(), {}) if found is None else found
        if found is None:
            self._write()

    def due(self) -> Iterator[Notification]:
        """Yield the events since the last call; each is marked when the next one is requested."""
        ids = [job_id for job_id in job_ids(self._home.runs) if _is_training(job_id)]
        for gone in self._record.handled.keys() - set(ids):
            del self._record.handled[gone]
        for job_id in sorted(ids, key=by_time):
            rundir = RunDir(self._home.runs / job_id)
            with suppress(FileNotFoundError):  # no event yet, or removed meanwhile
                stat = rundir.events.stat()
                is_read = stat.st_size <= self._offsets.get(job_id, 0)
                if stat.st_mtime >= self._record.begun and not is_read:
                    yield from self._due_of(rundir)

    def _due_of(self, rundir: RunDir) -> Iterator[Notification]:
        """The new events of one job; its file is read from where the last call ended."""
        job_id = rundir.path.name
        is_check = _is_check(rundir)
        with open(rundir.events, "rb") as file:
            file.seek(self._offsets.get(job_id, 0))
            for line in file:
                if not line.endswith(b"\n"):
                    return  # being written
                event = parse(line)
                if event is not None and not is_check and self._is_wanted(job_id, event):
                    yield _notification(rundir, event)
                    self._record.handled[job_id] = event["seq"]
                    self._write()
                self._offsets[job_id] = self._offsets.get(job_id, 0) + len(line)

    def _is_wanted(self, job_id: str, event: Mapping[str, Any]) -> bool:
        known = self._record
        is_new = event["seq"] > known.handled.get(job_id, 0) and event["time"] >= known.begun
        return is_new and event["type"] in self._wanted

    def _write(self) -> None:
        write_atomic(self._home.notified, orjson.dumps(self._record))


def _is_training(job_id: str) -> bool:
    kind = kind_of(job_id)
    return kind in KINDS and spec_class(kind).queue == TRAIN


def _is_check(rundir: RunDir) -> bool:
    """Whether it is a scratch job of `bench` or `verify-resume`."""
    try:
        return rundir.origin() == "check"
    except Conflict:  # its spec.json cannot be read
        return False


def _notification(rundir: RunDir, event: Mapping[str, Any]) -> Notification:
    found = labels.read(rundir)
    job_id, host = rundir.path.name, socket.gethostname()
    error = event.get("error")
    return Notification(
        text=f"warmd on {host}: {found.name or job_id} {_words(event)}",
        event=event["type"],
        job=job_id,
        name=found.name,
        tags=found.tags,
        step=event.get("step"),
        error=None if error is None else str(error),
        time=event["time"],
        host=host,
    )


def _words(event: Mapping[str, Any]) -> str:
    at = f" at step {event['step']}" if event.get("step") else ""
    match event["type"]:
        case "finished":
            values = [
                f"{n} {v:.4g}" for n, v in (event.get("result") or {}).items() if _is_float(v)
            ]
            return ", ".join([f"finished{at}", *values])
        case "failed":
            return f"failed{at}: {event.get('error') or 'no reason given'}"
        case "divergence":
            return f"diverges{at}: {event.get('metric', 'the loss')} is {event.get('value')}"
        case "stall":
            where = f": {event['message']}" if event.get("message") else ""
            return f"stalls{at}: the {event.get('activity', 'step')} does not end{where}"
        case other:
            return f"{other}{at}"


def _is_float(value: Any) -> bool:
    return isinstance(value, float)
