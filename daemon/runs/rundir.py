"""The run directory: the truth about what a job is and what it made.

spec.json      what was asked for, with everything that the job needs to be run again
events.jsonl   what happened
log.txt        what its libraries printed
checkpoints/   what it goes on from
init/          the weights that it began with, when they are another job's
model/         the final weights
result.json    what came out, for the revision of the spec that it names
lock           held by the horse that writes here; says which process that is
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from ...jobs.errors import Conflict, NotFound, SpecError
from ...jobs.files.atomic import fsync, write_atomic

SCHEMA = 1

_PARTS = {"id": str, "kind": str, "revision": int, "spec": dict}  # of spec.json, and their types
_ID = re.compile(r"[a-z][a-z0-9]{0,15}-\d{8}-\d{6}-[a-z0-9]{4}")
_ID_PREFIX = re.compile(r"[a-z0-9-]{1,40}")
_LETTERS = "23456789abcdefghjkmnpqrstuvwxyz"  # none that look alike, in the order they sort
_LONGEST_SIGNATURE = 100  # bytes
REMOVED = ".removed-"  # being removed, after which the job's id follows
_STAGING = ".new-"  # being made; no job's yet
_HALF_MADE_S = 3600  # after which nobody is at it any more: it takes milliseconds
_SLOTS = len(_LETTERS) ** 4  # into which a second is divided

# Who queued a job, as spec.json has it.
ORIGINS = ("cli", "check", "http")  # "check": a bench or a verify-resume did


def is_job_id(text: str) -> bool:
    """Whether the text is a job id; only then may it become part of a path or a key."""
    return _ID.fullmatch(text) is not None


def is_id_prefix(text: str) -> bool:
    """Whether some job id could begin with the text."""
    return _ID_PREFIX.fullmatch(text) is not None


def job_ids(runs: Path, *, since: str = "") -> list[str]:
    """Return the names of the run directories that are there, in no order.

    `since`: of a job (as `by_time` gives it); those of earlier ones are left out.
    """
    try:
        names = os.listdir(runs)
    except FileNotFoundError:
        return []
    return [name for name in names if by_time(name) >= since and is_job_id(name)]


def by_time(job_id: str) -> str:
    """Return what job ids are sorted by: in an id the time follows the kind."""
    return job_id.partition("-")[2]


def new_id(kind: str, slot: int) -> str:
    """Return the id of a slot of time since 1970: `grpo-20261121-184200-x7f2`, in UTC.

    Ids sort by time, whatever the time zone and however often its clock is put back.
    """
    second, rest = divmod(slot, _SLOTS)
    suffix = ""
    for _ in range(4):
        rest, letter = divmod(rest, len(_LETTERS))
        suffix = _LETTERS[letter] + suffix
    return f"{kind}-{datetime.fromtimestamp(second, UTC):%Y%m%d-%H%M%S}-{suffix}"


class _Slots:
    """Slots of time, each given once and above the one before, also where the clock steps back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest = 0

    def take(self) -> int:
        with self._lock:
            now = time.time_ns() * _SLOTS // 1_000_000_000
            self._latest = max(now, self._latest + 1)
            return self._latest


_slots = _Slots()


@dataclass(frozen=True)
class RunDir:
    """One run directory."""

    path: Path

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @classmethod
    def create(
        cls, runs: Path, kind: str, document: dict[str, Any], *, durable: bool = True
    ) -> RunDir:
        """Make the run directory of a new job, whole, under a fresh id.

        `document` is the content of spec.json but for `schema`, `id`, `kind` and `revision`. An id
        that another process has taken is left to it.
        When not `durable`, the caller flushes `unflushed` before anybody may rely on the job.
        """
        while True:
            job_id = new_id(kind, _slots.take())
            staging = runs / f"{_STAGING}{job_id}"
            try:
                staging.mkdir(mode=0o700)
                spec = {
                    "schema": SCHEMA,
                    "id": job_id,
                    "kind": kind,
                    "revision": 1,
                    "created": datetime.now().astimezone().isoformat(timespec="seconds"),
                    **document,
                }
                if durable:
                    write_atomic(staging / "spec.json", _pretty(spec))
                else:
                    (staging / "spec.json").touch(mode=0o600)
                    (staging / "spec.json").write_bytes(_pretty(spec))
                staging.rename(runs / job_id)
            except FileExistsError:
                continue  # somebody is making it
            except OSError as error:
                shutil.rmtree(staging, ignore_errors=True)
                if error.errno == errno.ENOTEMPTY:
                    continue  # somebody has made it
                raise SpecError("home", f"cannot write a run directory: {error}") from error
            if durable:
                fsync(runs)
            return cls(runs / job_id)

    @classmethod
    def open(cls, runs: Path, job_id: str) -> RunDir:
        """Return the run directory of a job. Raises NotFound, also for what is no id."""
        if not is_job_id(job_id) or not (runs / job_id / "spec.json").is_file():
            raise NotFound(f"job: no job {job_id[:80]!r} in {runs}")
        return cls(runs / job_id)

    @property
    def unflushed(self) -> tuple[Path, ...]:
        """What must be on disk for a new run directory to outlive a power cut."""
        return self.path / "spec.json", self.path, self.path.parent

    def annotate(self, **parts: Any) -> None:
        """Change parts of spec.json that say nothing of what the job does: its result stands."""
        write_atomic(self.path / "spec.json", _pretty({**self.read_spec(), **parts}))

    def remove(self) -> None:
        """Remove it all; for a job that was never accepted."""
        shutil.rmtree(self.path, ignore_errors=True)

    def read_spec(self) -> dict[str, Any]:
        """Return spec.json. Raises Conflict for one of a later schema or that somebody spoilt."""
        path = self.path / "spec.json"
        try:
            document = orjson.loads(path.read_bytes())
        except (OSError, orjson.JSONDecodeError) as error:
            raise Conflict(f"{path}: cannot be read: {error}") from error
        if not isinstance(document, dict) or not isinstance(document.get("schema"), int):
            raise Conflict(f"{path}: must be a job's spec with its schema")
        if document["schema"] > SCHEMA:
            raise Conflict(
                f"{self.path}: written by a later warmd (schema {document['schema']}, this one "
                f"reads up to {SCHEMA}): upgrade warmd"
            )
        for name, type in _PARTS.items():
            if not isinstance(document.get(name), type):
                raise Conflict(f"{path}: {name} must be {type.__name__}")
        return document

    def origin(self) -> str:
        """Return who queued the job: one of ORIGINS. Raises Conflict as read_spec does."""
        document = self.read_spec()
        # Earlier versions did not say; what came over HTTP could import no code even then.
        of_old = "http" if document.get("python_path") == [] else "cli"
        return str(document.get("origin") or of_old)

    def created_at(self) -> float:
        """Return when the job was made, in unix seconds. Raises Conflict as read_spec does."""
        try:
            return datetime.fromisoformat(self.read_spec()["created"]).timestamp()
        except (KeyError, TypeError, ValueError):
            return 0.0

    @contextmanager
    def revising(self) -> Iterator[None]:
        """Let one process at a time change what the job is; the others wait."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def revise(self, **parts: Any) -> None:
        """Change parts of spec.json; results of the revision before no longer count."""
        document = {**self.read_spec(), **parts}
        document["revision"] += 1
        write_atomic(self.path / "spec.json", _pretty(document))

    def read_result(self) -> dict[str, Any] | None:
        """Return the result of the spec as it stands, or None when there is none (yet).

        One that cannot be read is none: the job makes it again, from its last checkpoint.
        """
        try:
            document = orjson.loads((self.path / "result.json").read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return None
        is_result = isinstance(document, dict) and isinstance(document.get("result"), dict)
        if not is_result or document.get("revision") != self.read_spec()["revision"]:
            return None
        result: dict[str, Any] = document["result"]
        return result

    def write_result(self, result: dict[str, Any], *, revision: int) -> None:
        document = {"schema": SCHEMA, "revision": revision, "result": result}
        write_atomic(self.path / "result.json", _pretty(document))

    @contextmanager
    def unused(self) -> Iterator[None]:
        """Keep executions from beginning, for a moment. Raises Conflict when one is there."""
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)  # no horse
            yield
        except BlockingIOError:
            raise Conflict(f"job: {self.path.name} runs: stop it first") from None
        finally:
            os.close(fd)

    def holder(self) -> int | None:
        """Return the horse of this machine that writes here now, None for none."""
        with contextlib.suppress(FileNotFoundError), open(self.path / "lock", "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _signed_by(file.fileno())
        return None

    def is_held(self) -> bool:
        """Whether some process, perhaps of another machine, writes here now."""
        with contextlib.suppress(FileNotFoundError), open(self.path / "lock", "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def lock(self, *, patience_s: float = 5.0) -> int:
        """Take the directory for this process; return the lock's descriptor.

        A horse whose worker died ends by itself. One that still holds the lock after `patience_s`
        is stuck, and is killed: two executions must never write here together. One of another
        machine is waited for.
        """
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline and (holder := _signed_by(fd)) is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(holder, signal.SIGKILL)
                time.sleep(0.02)
            else:
                os.ftruncate(fd, 0)
                os.pwrite(fd, _signature(os.getpid()), 0)
                return fd


def sweep(runs: Path) -> None:
    """Remove run directories that their makers, who died, have left half-made."""
    for staging in runs.glob(f"{_STAGING}*"):
        with contextlib.suppress(FileNotFoundError):  # it is whole now, or another one sweeps
            if time.time() - staging.stat().st_mtime > _HALF_MADE_S:
                shutil.rmtree(staging, ignore_errors=True)


def _signature(pid: int) -> bytes:
    """Its id, when it began and on which boot: all processes of all machines differ in it.

    Empty for a process that is gone, and where the kernel does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return b""
    began = stat.rpartition(b")")[2].split()[19]  # in ticks since the boot; a name may hold spaces
    return b"%d %s %s" % (pid, began, boot)


def _signed_by(lock: int) -> int | None:
    """Return the living process of this machine that signed a lock, None for any other."""
    signature = os.pread(lock, _LONGEST_SIGNATURE, 0)
    pid = signature.partition(b" ")[0]
    return int(pid) if pid.isdigit() and signature == _signature(int(pid)) else None


def _pretty(document: dict[str, Any]) -> bytes:
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
    return orjson.dumps(document, option=options)
