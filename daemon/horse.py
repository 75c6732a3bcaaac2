"""The work horse: a child of the zygote that runs one job and leaves by _exit.

It writes the run directory and talks to its worker over one connection: events and the outcome
go out, a request to stop comes in. When the worker dies the connection closes and the horse ends
at once: its job will be begun again from the latest checkpoint, by somebody else.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from ..configs.values import num_cores
from ..jobs import run_function, spec_class
from ..jobs.context import Context
from ..jobs.errors import Stopped, WarmdError
from .channel import Channel
from .checkpoints import Checkpoints
from .events import EventLog
from .models import HorseModels, WarmModels
from .rundir import RunDir

log = logging.getLogger(__name__)

# glibc's mallopt: keep freed activations instead of giving them back to the kernel every step.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1

# A model of fewer parameters is slower with more than one thread.
_SMALL_MODEL = 20_000_000


class Line:
    """The horse's end of the connection, read by a thread of its own."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.stop = threading.Event()
        self.reason = "drain"
        self._requests: list[dict[str, Any]] = []
        self._arrived = threading.Condition()
        signal.signal(signal.SIGTERM, lambda *_: self.stop.set())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=self._listen, name="line", daemon=True).start()

    def _listen(self) -> None:
        for message in self.channel:
            if "stop" in message:
                self.reason = message["stop"]
                self.stop.set()
            else:
                with self._arrived:
                    self._requests.append(message)
                    self._arrived.notify()
        os._exit(0)

    def next_request(self) -> dict[str, Any]:
        """Wait for the next job (a resident horse's)."""
        with self._arrived:
            while not self._requests:
                self._arrived.wait()
            return self._requests.pop(0)

    def send(self, message: dict[str, Any]) -> None:
        try:
            self.channel.send(message)
        except OSError:
            os._exit(0)


def run_jobs(channel: Channel, request: dict[str, Any], models: WarmModels) -> None:
    """Run the requested job and, when resident, those that follow. Called in the fresh child."""
    os.setpgid(0, 0)
    _be_first_to_die()
    _tune_allocator()
    line = Line(channel)
    line.send({"pid": os.getpid()})
    resident = request["isolation"] == "resident"
    while True:
        try:
            outcome = _run_one(line, request, models, private=not resident)
        except OSError as error:  # its files cannot be written, so nobody has been told yet
            outcome = {"outcome": "failed", "error": f"run directory: {error}", "untold": "yes"}
        sys.stdout.flush()
        sys.stderr.flush()
        line.send(outcome)
        if not resident:
            return
        request = line.next_request()
        line.stop.clear()


def _run_one(
    line: Line, request: dict[str, Any], warm: WarmModels, *, private: bool
) -> dict[str, Any]:
    rundir = RunDir(Path(request["run_dir"]))
    _redirect_output(rundir.log)
    lock = rundir.lock()
    try:
        with EventLog(
            rundir.events,
            execution=request["execution"],
            publish=lambda event: line.send({"event": event}),
        ) as events:
            return _execute(line, request, rundir, events, warm, private=private)
    finally:
        os.close(lock)


def _execute(
    line: Line,
    request: dict[str, Any],
    rundir: RunDir,
    events: EventLog,
    warm: WarmModels,
    *,
    private: bool,
) -> dict[str, Any]:
    """Run the job; every way it can end becomes an event and an outcome."""
    try:
        document = rundir.read_spec()
        names = {}
        if request["model"] is not None:
            names[document["spec"]["model"]] = request["model"]["config"]["name"]
        models = HorseModels(warm, names, private=private)
        threads = _choose_threads(request["threads"], models)
        for folder in document.get("python_path", ()):
            if folder not in sys.path:
                sys.path.append(folder)
        spec = spec_class(document["kind"]).parse(document["spec"])
        context = Context(
            job_id=document["id"],
            run_dir=rundir.path,
            device=_device(),
            models=models,
            checkpoints=Checkpoints(
                rundir.checkpoints,
                keep=getattr(spec, "keep", 3),
                best=getattr(spec, "best", None),
                on_skip=lambda message: events.emit("warning", message=message),
            ),
            emit=events.emit,
            stop=line.stop,
        )
        run = run_function(document["kind"])
        waited = time.time() - request["enqueued_at"] if request.get("enqueued_at") else None
        events.emit("started", pid=os.getpid(), threads=threads, queued_s=waited)
        result = run(spec, context)
        rundir.write_result(result, revision=document["revision"])
        events.emit("finished", result=result)
        return {"outcome": "finished", "result": result}
    except Stopped as stopped:
        if line.reason == "drain":
            events.emit("requeued", step=stopped.step, reason="the daemon stops")
        else:
            events.emit("stopped", step=stopped.step, reason=f"asked to {line.reason}")
        return {"outcome": "stopped", "reason": line.reason, "step": stopped.step}
    except WarmdError as error:
        return _failed(events, str(error), None)
    except BaseException as error:  # whatever a job raises is its failure, not the horse's
        text = traceback.format_exc()
        return _failed(events, "".join(traceback.format_exception_only(error)).strip(), text)


def _failed(events: EventLog, error: str, trace: str | None) -> dict[str, Any]:
    outcome = {"outcome": "failed", "error": trace or error}
    try:
        events.emit("failed", error=error, traceback=trace)
        sys.stderr.write(trace or "")
    except OSError:  # a full disk, and perhaps the very reason: Redis still has room for it
        outcome["untold"] = "yes"
    return outcome


def _choose_threads(threads: int | None, models: HorseModels) -> int:
    """Set and return the number of threads; the same for every execution on one machine."""
    import torch

    if threads is None:
        size = models.num_parameters()
        threads = 1 if size is not None and size < _SMALL_MODEL else num_cores()
    torch.set_num_threads(threads)
    return threads


def _device() -> str:
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


def _be_first_to_die() -> None:
    # When memory runs out the kernel should take the job, not the daemon.
    try:
        Path("/proc/self/oom_score_adj").write_text("500")
    except OSError as error:
        log.debug("oom_score_adj: %s", error)


def _tune_allocator() -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_THRESHOLD, _NEVER)
            libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def _redirect_output(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
