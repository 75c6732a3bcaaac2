"""The work horse: a child of the zygote that runs one job and leaves by _exit.

It writes the run directory and talks to its worker over one connection: events and the outcome
go out, a request to stop comes in. When the worker dies the connection closes and the horse ends
at once: its job will be begun again from the latest checkpoint, by somebody else.

The processes that a job's own code starts end with the job (host/descendants.py).
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ...configs.queues import TRAIN
from ...configs.values import num_cores
from ...jobs import run_function, spec_class
from ...jobs.compute.allocator import keep_freed_memory
from ...jobs.context import Context
from ...jobs.errors import Stopped, WarmdError
from ...jobs.files.atomic import release
from ...jobs.user_code import tracebacks
from ...jobs.user_code.modules import own_modules
from ..host.channel import Channel, check_size
from ..host.descendants import adopt_orphans, end_descendants
from ..host.stacks import write_stacks_when_asked
from ..runs.checkpoints import Checkpoints
from ..runs.events import EventLog, read
from ..runs.rundir import RunDir
from .activity import Pulse
from .models import HorseModels, WarmModels
from .placement import Placement, own_device

log = logging.getLogger(__name__)

# A model of fewer parameters is slower with more than one thread.
_SMALL_MODEL = 20_000_000

_MOMENT_S = 0.01  # for which an event waits for those of other jobs
_MOST_LEAVING_S = 1.0  # for a job's processes to die when their horse has to


class Orders:
    """What one job is asked for while it runs."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.pause = threading.Event()
        self.reason = "drain"  # of the stop


class Line:
    """The horse's end of the connection, read by a thread of its own."""

    def __init__(self, channel: Channel, request: dict[str, Any]) -> None:
        """`request`: the first job, which came to the zygote."""
        self.channel = channel
        self._orders = {request["job_id"]: Orders()}  # by job id
        self._requests = [request]
        self._arrived = threading.Condition()
        self._unsent: list[dict[str, Any]] = []
        self._sending = threading.Condition()
        self._pid = os.getpid()
        signal.signal(signal.SIGTERM, self._stop_all)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.register_at_fork(after_in_child=self._let_go)
        threading.Thread(target=self._listen, name="line", daemon=True).start()
        threading.Thread(target=self._send_events, name="events", daemon=True).start()

    def _let_go(self) -> None:
        """Forget the line in a process that a job's own code forks.

        With a copy of the connection it would hide the horse's death from the worker; with the
        horse's handlers, `multiprocessing.Pool.terminate` would wait for it for ever.
        """
        self.channel.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _stop_all(self, *_: Any) -> None:
        for orders in list(self._orders.values()):
            orders.stop.set()

    def _listen(self) -> None:
        for message in self.channel:
            if "op" in message:
                with self._arrived:
                    self._orders[message["job_id"]] = Orders()
                    self._requests.append(message)
                    self._arrived.notify()
                continue
            orders = self._orders.get(message["job"])
            if orders is None:
                continue  # it has just ended
            if "stop" in message:
                orders.reason = message["stop"]
                orders.stop.set()
            elif message["pause"]:
                orders.pause.set()
            else:
                orders.pause.clear()
        self._leave()

    def _leave(self) -> NoReturn:
        """End at once: there is nobody left to work for."""
        if os.getpid() == self._pid:
            end_descendants(within_s=_MOST_LEAVING_S)
        os._exit(0)

    def next_request(self) -> tuple[dict[str, Any], Orders]:
        """Wait for the next job; what it is asked for meanwhile shows in its orders."""
        with self._arrived:
            while not self._requests:
                self._arrived.wait()
            request = self._requests.pop(0)
            return request, self._orders[request["job_id"]]

    def forget(self, job_id: str) -> None:
        """The job has ended: there is nothing left to ask of it."""
        self._orders.pop(job_id, None)

    def send(self, message: dict[str, Any]) -> None:
        """Send at once; an event, where other jobs have their events too, in a moment with these.

        What each word costs, at every place that it comes by, is taken from the computing of all.
        """
        with self._sending:
            self._unsent.append(message)
            if "event" not in message or len(self._orders) == 1:
                self._send_all()
            elif len(self._unsent) == 1:
                self._sending.notify()

    def _send_events(self) -> None:
        """Send what `send` leaves for later, for ever."""
        with self._sending:
            while True:
                self._sending.wait_for(lambda: self._unsent)
                self._sending.wait(_MOMENT_S)
                self._send_all()

    def _send_all(self) -> None:
        unsent, self._unsent = self._unsent, []
        try:
            self.channel.send(*unsent)
        except OSError:
            self._leave()


def run_jobs(channel: Channel, request: dict[str, Any], models: WarmModels) -> None:
    """Run the requested job and, when resident, those that follow. Called in the fresh child."""
    os.setpgid(0, 0)
    os.nice(request["niceness"])
    adopt_orphans()
    write_stacks_when_asked()
    _be_first_to_die()
    keep_freed_memory()
    line = Line(channel, request)
    line.send({"pid": os.getpid()})
    _hold_files(models, request["model"])
    placement = Placement(own_device())
    is_resident = request["isolation"] == "resident"
    if is_resident and request["slots"] > 1:
        _run_together(line, models, placement)
    while True:
        job, orders = line.next_request()
        _run_one(line, job, orders, models, placement, is_resident=is_resident)
        if not is_resident:
            return


def _hold_files(models: WarmModels, model: dict[str, Any] | None) -> None:
    """Keep the model as it is mapped, whoever writes to its files; see held_files.

    The signal is heard between two operations of the thread that trains, so nothing changes the
    weights meanwhile; a horse with several threads only reads them.
    """

    def keep(*_: Any) -> None:
        try:
            models.keep_as_mapped()
        except MemoryError:
            log.exception("horse: its model's files are about to be changed")
            os._exit(1)  # it would compute with what is written there

    signal.signal(signal.SIGIO, keep)
    models.hold_in_fork(None if model is None else model["config"]["name"])
    keep()  # what was asked for while there was no handler of ours


def _run_together(line: Line, models: WarmModels, placement: Placement) -> None:
    """Run every job in a thread of its own, all on the same models. Does not return."""
    os.dup2(2, 1)  # what they print cannot be told apart: it goes to the daemon's log
    while True:
        job, orders = line.next_request()
        run = partial(
            _run_one, line, job, orders, models, placement, is_resident=True, own_output=False
        )
        threading.Thread(target=run, name=job["job_id"], daemon=True).start()


def _run_one(
    line: Line,
    request: dict[str, Any],
    orders: Orders,
    models: WarmModels,
    placement: Placement,
    *,
    is_resident: bool,
    own_output: bool = True,
) -> None:
    """Run a job to its end, and say how it ended.

    `is_resident`: this horse runs others, too; `own_output`: what it prints goes to the job's log.
    """
    rundir = RunDir(Path(request["run_dir"]))
    job_id = request["job_id"]
    try:
        if own_output:
            _redirect_output(rundir.log)
        lock = rundir.lock()
        try:
            events = EventLog(
                rundir.events,
                execution=request["execution"],
                publish=lambda event: line.send({"job": job_id, "event": event}),
            )
            pulse = Pulse(lambda activity: line.send({"job": job_id, "activity": activity}))
            with events, pulse:
                outcome = _execute(
                    request, orders, rundir, events, pulse, models, placement, is_resident
                )
        finally:
            release(lock)
            if own_output:  # it runs this job alone
                _end_processes()
    except OSError as error:  # its files cannot be written, so nobody has been told yet
        outcome = {"outcome": "failed", "error": f"run directory: {error}", "untold": "yes"}
    sys.stdout.flush()
    sys.stderr.flush()
    line.forget(job_id)
    line.send({"job": job_id, **outcome})


def _end_processes() -> None:
    """Kill every process that the job has started and left running.

    Otherwise one of them could still write to the run directory when the job is next resumed.
    """
    gc.collect()  # an unreferenced multiprocessing pool stops its handler, which restarts workers
    ended = end_descendants()
    if ended:
        log.warning("%d processes that the job had started ended with it", ended)


def _execute(
    request: dict[str, Any],
    orders: Orders,
    rundir: RunDir,
    events: EventLog,
    pulse: Pulse,
    warm: WarmModels,
    placement: Placement,
    is_resident: bool,
) -> dict[str, Any]:
    """Run the job; every way it can end becomes an event and an outcome."""
    try:
        document = rundir.read_spec()
        kind = spec_class(document["kind"])
        names = {}
        if request["model"] is not None:
            names[document["spec"]["model"]] = request["model"]["config"]["name"]
        copies = is_resident and kind.queue == TRAIN
        models = HorseModels(warm, names, copies=copies, placement=placement)
        # Those of queue infer run no code of the user's, and several at a time.
        folders = document.get("python_path", ()) if kind.queue == TRAIN else None
        with own_modules(folders) if folders is not None else nullcontext():
            result = _run(document, request, orders, rundir, events, pulse, models)
        check_size(result)
        rundir.write_result(result, revision=document["revision"])
        events.emit("finished", result=result)
        return {"outcome": "finished", "result": result}
    except Stopped as stopped:
        if not orders.stop.is_set():
            events.emit("stopped", step=stopped.step, reason="as far as it was to go")
            return {"outcome": "stopped", "reason": "cancel", "step": stopped.step}
        if orders.reason == "drain":
            events.emit("requeued", step=stopped.step, reason="the daemon stops")
        elif orders.reason == "pause":
            events.emit("paused", step=stopped.step, released=True)
        else:
            events.emit("stopped", step=stopped.step, reason=f"asked to {orders.reason}")
        return {"outcome": "stopped", "reason": orders.reason, "step": stopped.step}
    except WarmdError as error:
        # One line is enough to act on; where it came from is in the log.
        reason = tracebacks.cut(str(error), tracebacks.MOST_TRACE)
        cause = error.__cause__
        return _failed(rundir, events, reason, logged=tracebacks.trace(cause) if cause else None)
    except BaseException as error:  # whatever a job raises is its failure, not the horse's
        text = tracebacks.trace(error)
        return _failed(rundir, events, tracebacks.reason(error), trace=text, logged=text)


def _tell_of_changes(
    request: dict[str, Any], rundir: RunDir, events: EventLog, weights: dict[str, str] | None
) -> None:
    """Warn of a model that is not what it was: when it was loaded, or when the job began."""
    if weights is None:
        return
    if request.pop("is_model_changed", False):
        events.emit("warning", message="model: its files have changed, so it was loaded again")
    if request["execution"] > 1:
        started = (e for e in read(rundir.events) if e["type"] == "started" and e.get("weights"))
        before = next((event["weights"]["digest"] for event in started), weights["digest"])
        if before != weights["digest"]:
            events.emit(
                "warning",
                message="model: its files have changed since this job began: "
                f"{weights['digest']}, and {before} then",
            )


def _run(
    document: dict[str, Any],
    request: dict[str, Any],
    orders: Orders,
    rundir: RunDir,
    events: EventLog,
    pulse: Pulse,
    models: HorseModels,
) -> dict[str, Any]:
    """Run the job's kind on its spec; return its result."""
    threads = _choose_threads(request["threads"], models)
    spec = spec_class(document["kind"]).parse(document["spec"])
    waited = time.time() - request["enqueued_at"] if request.get("enqueued_at") else None
    checkpoints = Checkpoints(
        rundir.checkpoints,
        keep=getattr(spec, "keep", 3),
        best=getattr(spec, "best", None),
        on_warning=lambda message: events.emit("warning", message=message),
    )
    context = Context(
        job_id=document["id"],
        run_dir=rundir.path,
        device=models.placement.device,
        models=models,
        checkpoints=checkpoints,
        emit=events.emit,
        stop=orders.stop,
        pause=orders.pause,
        working=pulse.working,
        stop_at=document.get("stop_at"),
        queued_s=waited,
    )
    run = run_function(document["kind"])
    forked_at = request.get("forked_at")  # a resident horse was forked for another
    fork_s = None if forked_at is None else time.monotonic() - forked_at
    weights = models.weights()
    _tell_of_changes(request, rundir, events, weights)
    events.emit(
        "started",
        pid=os.getpid(),
        threads=threads,
        queued_s=waited,
        fork_s=fork_s,
        weights=weights,
    )
    try:
        return {**run(spec, context), "weights": weights}
    finally:
        # One that a stop or an error has left behind, as in an evaluation after the last step.
        checkpoints.settle()


def _failed(
    rundir: RunDir,
    events: EventLog,
    error: str,
    *,
    trace: str | None = None,
    logged: str | None = None,
) -> dict[str, Any]:
    """Say that the job failed; `trace` goes with the event, `logged` to the job's log."""
    outcome = {"outcome": "failed", "error": trace or error}
    try:
        events.emit("failed", error=error, traceback=trace)
        with open(rundir.log, "a") as log_file:
            log_file.write(logged or "")
    except OSError:  # a full disk, and perhaps the very reason: Redis still has room for it
        outcome["untold"] = "yes"
    return outcome


def _choose_threads(threads: int | None, models: HorseModels) -> int:
    """Set and return the number of threads; the same for every execution on one machine."""
    from ...jobs.compute.threads import compute_with

    if threads is None:
        size = models.num_parameters()
        threads = 1 if size is not None and size < _SMALL_MODEL else num_cores()
    compute_with(threads)
    return threads


def _be_first_to_die() -> None:
    # When memory runs out the kernel should take the job, not the daemon.
    try:
        Path("/proc/self/oom_score_adj").write_text("500")
    except OSError as error:
        log.debug("oom_score_adj: %s", error)


def _redirect_output(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
