"""The run directory: the authoritative record of a job and its results.

spec.json      the spec, with everything that is needed to run the job again
events.jsonl   the events
log.txt        output of libraries and of user code
labels.json    name, tags and notes, for people
queue.json     the latest request that concerns the queue: paused, canceled, continued, resumed
source/        the code and versions that it ran
checkpoints/   the checkpoints
completions.jsonl  those that GRPO was trained on
plan.json      the plans of a training with a time limit
init/          the initial weights, if they come from another job
model/         the final weights
result.json    the result, with the revision of the spec that it belongs to
execution      the number of the latest execution, from the second on
lock           held by the horse that writes here; contains its process id
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from ...jobs import stored_options
from ...jobs.errors import Conflict, NotFound, SpecError
from ...jobs.files.atomic import fsync, locked, naming, release, write_atomic
from ...jobs.ids import fresh_id, is_job_id, kind_of
from .fence import Fence
from .seal import DAMAGED, is_whole, sealed

SCHEMA = 1

_PARTS = {"id": str, "kind": str, "revision": int, "spec": dict}  # of spec.json, with their types
_LONGEST_SIGNATURE = 100  # bytes
REMOVED = ".removed-"  # prefix of a run directory that is being removed
STAGING = ".new-"  # prefix of one that is being created
_STALE_S = 3600  # age of a stale one; creating a run directory takes milliseconds

# Who submitted a job (in spec.json). "check": `warmd bench` or `checkpoints verify --resume`.
ORIGINS = ("cli", "check", "http")


def job_ids(runs: Path) -> list[str]:
    """Return the ids of all run directories, unordered."""
    try:
        names = os.listdir(runs)
    except FileNotFoundError:
        return []
    return [name for name in names if is_job_id(name)]


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
        """Create the run directory of a new job atomically, under a new id.

        `document` is the content of spec.json without `schema`, `id`, `kind` and `revision`. If not
        `durable`, the caller must flush the files in `unflushed` before it acknowledges the job.
        """
        while True:
            job_id = fresh_id(kind)
            staging, path = runs / f"{STAGING}{job_id}", runs / job_id
            is_here = False
            try:
                staging.mkdir(mode=0o700)
                spec = _spec_json(job_id, kind, document)
                if durable:
                    write_atomic(staging / "spec.json", sealed(spec))
                else:
                    (staging / "spec.json").touch(mode=0o600)
                    (staging / "spec.json").write_bytes(sealed(spec))
                staging.rename(path)
                is_here = True
                if durable:
                    fsync(runs)
            except FileExistsError:
                continue  # another process is creating this id
            except BaseException as error:  # also Ctrl-C
                shutil.rmtree(path if is_here else staging, ignore_errors=True)
                if not isinstance(error, OSError):
                    raise
                if error.errno == errno.ENOTEMPTY:
                    continue  # another process has created this id
                raise SpecError("home", f"cannot write a run directory: {error}") from error
            return cls(runs / job_id)

    @classmethod
    def ensure(cls, runs: Path, job_id: str, document: dict[str, Any]) -> RunDir:
        """Create the run directory with this id unless it is there, atomically.

        The caller prevents a second call for the same id at the same time. `document`: as in
        `create`.
        """
        if not (runs / job_id).is_dir():
            staging = runs / f"{STAGING}{job_id}"
            shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
            staging.mkdir(mode=0o700)
            kind = kind_of(job_id)
            write_atomic(staging / "spec.json", sealed(_spec_json(job_id, kind, document)))
            staging.rename(runs / job_id)
            fsync(runs)
        return cls(runs / job_id)

    @classmethod
    def open(cls, runs: Path, job_id: str) -> RunDir:
        """Return the run directory of a job. Raises NotFound, also for an invalid id."""
        if not is_job_id(job_id) or not (runs / job_id / "spec.json").is_file():
            raise NotFound(f"job: no job {job_id[:80]!r} in {runs}")
        return cls(runs / job_id)

    @property
    def unflushed(self) -> tuple[Path, ...]:
        """The paths to flush so that a new run directory survives a power failure."""
        return self.path / "spec.json", self.path, self.path.parent

    def annotate(self, **parts: Any) -> None:
        """Change parts of spec.json that do not affect the job's result, which stays valid."""
        write_atomic(self.path / "spec.json", sealed({**self.read_spec(), **parts}))

    def remove(self) -> None:
        """Remove the directory; for a job that was never queued."""
        shutil.rmtree(self.path, ignore_errors=True)

    def read_spec(self) -> dict[str, Any]:
        """Return spec.json. Raises Conflict if it is damaged or of a later schema."""
        path = self.path / "spec.json"
        try:
            document = orjson.loads(path.read_bytes())
        except (OSError, orjson.JSONDecodeError) as error:
            raise Conflict(f"{path}: cannot be read: {error}") from error
        if not isinstance(document, dict) or type(document.get("schema")) is not int:
            raise Conflict(f"{path}: must be a job's spec with its schema")
        if document["schema"] > SCHEMA:
            raise Conflict(
                f"{self.path}: written by a later warmd (schema {document['schema']}, this one "
                f"reads up to {SCHEMA}): upgrade warmd"
            )
        if not is_whole(document):
            raise Conflict(f"{path}: {DAMAGED}")
        for name, wanted in _PARTS.items():
            if not isinstance(document.get(name), wanted):
                raise Conflict(f"{path}: {name} must be {wanted.__name__}")
        document["spec"] = stored_options(document["kind"], document["spec"])
        return document

    def origin(self) -> str:
        """Return who submitted the job: one of ORIGINS. Raises Conflict as read_spec does."""
        document = self.read_spec()
        # Earlier versions did not store it, but gave HTTP jobs an empty python_path.
        default = "http" if document.get("python_path") == [] else "cli"
        return str(document.get("origin") or default)

    def created_at(self) -> float:
        """Return the time of creation in unix seconds. Raises Conflict as read_spec does."""
        try:
            return datetime.fromisoformat(self.read_spec()["created"]).timestamp()
        except (KeyError, TypeError, ValueError):
            return 0.0

    @contextmanager
    def revising(self) -> Iterator[None]:
        """Lock the directory for a change of spec.json; other processes wait."""
        with locked(self.path):
            yield

    def revise(self, **parts: Any) -> None:
        """Change parts of spec.json as a new revision; a result of the old one is invalid."""
        document = {**self.read_spec(), **parts}
        document["revision"] += 1
        write_atomic(self.path / "spec.json", sealed(document))

    def read_result(self) -> dict[str, Any] | None:
        """Return the result for the current revision of the spec, or None.

        A damaged result counts as none: the job computes it again from its last checkpoint.
        """
        try:
            document = orjson.loads((self.path / "result.json").read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return None
        is_result = isinstance(document, dict) and isinstance(document.get("result"), dict)
        if not is_result or not is_whole(document):
            return None
        if document.get("revision") != self.read_spec()["revision"]:
            return None
        result: dict[str, Any] = document["result"]
        return result

    def write_result(
        self, result: dict[str, Any], *, revision: int, fence: Fence | None = None
    ) -> None:
        """Write the result of an execution. Raises Superseded if a later one has begun."""
        document = {"schema": SCHEMA, "revision": revision, "result": result}
        if fence is not None:
            document["execution"] = fence.execution
            fence.check()
        write_atomic(self.path / "result.json", sealed(document))

    @contextmanager
    def unused(self) -> Iterator[None]:
        """Prevent executions from starting within the block. Raises Conflict if one is running."""
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)  # no horse
            yield
        except BlockingIOError:
            raise Conflict(f"job: {self.path.name} is running: stop it first") from None
        finally:
            os.close(fd)

    def holder(self) -> int | None:
        """Return the process id of the horse on this machine that holds the lock, or None."""
        with contextlib.suppress(FileNotFoundError), open(self.path / "lock", "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _holder_of(file.fileno())
        return None

    def is_held(self) -> bool:
        """Whether a process, perhaps on another machine, holds the lock."""
        with contextlib.suppress(FileNotFoundError), open(self.path / "lock", "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def lock(self, *, patience_s: float = 5.0) -> int:
        """Lock the directory for this process; return the lock's descriptor.

        A horse whose worker died ends by itself. One that still holds the lock after `patience_s`
        hangs, and is killed: two executions must never write here. A horse on another machine is
        waited for. Raises OSError, with the directory unlocked, if the lock cannot be written.
        """
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline and (holder := _holder_of(fd)) is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(holder, signal.SIGKILL)
                time.sleep(0.02)
            else:
                try:
                    with naming(self.path / "lock"):
                        os.ftruncate(fd, 0)
                        os.pwrite(fd, _signature(os.getpid()), 0)
                except OSError:
                    release(fd)
                    raise
                return fd


def _spec_json(job_id: str, kind: str, document: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a new spec.json."""
    return {
        "schema": SCHEMA,
        "id": job_id,
        "kind": kind,
        "revision": 1,
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        **document,
    }


def trainer_of(path: str) -> str | None:
    """Return the job whose final model is at a path, in `runs` of this or another home."""
    folder = Path(path)
    is_model = folder.is_absolute() and folder.name == "model" and is_job_id(folder.parent.name)
    return folder.parent.name if is_model else None


def remove_stale_staging(parent: Path) -> None:
    """Remove incomplete folders of jobs or groups whose processes died while they created them."""
    for staging in parent.glob(f"{STAGING}*"):
        with contextlib.suppress(FileNotFoundError):  # completed, or removed by another process
            if time.time() - staging.stat().st_mtime > _STALE_S:
                shutil.rmtree(staging, ignore_errors=True)


def _signature(pid: int) -> bytes:
    """Return the process id, start time, boot id and namespace of a process that is seen from here.

    Together they are unique among all processes of all machines and containers: two containers of
    one machine have the same boot id, and may start processes with the same id at the same time.
    Empty if the process is gone, or if there is no /proc.
    """
    try:
        namespace = os.readlink("/proc/self/ns/pid").encode()  # that in which `pid` is counted
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return b""
    began = stat.rpartition(b")")[2].split()[19]  # in ticks since boot; the name may contain spaces
    return b"%d %s %s %s" % (pid, began, boot, namespace)


def _holder_of(lock: int) -> int | None:
    """Return the id of the living process on this machine that wrote a lock, or None."""
    signature = os.pread(lock, _LONGEST_SIGNATURE, 0)
    pid = signature.partition(b" ")[0]
    return int(pid) if pid.isdigit() and signature == _signature(int(pid)) else None
