"""The zygote: holds every library and every warm model, and forks the work horses.

It has one thread, never computes and never initializes CUDA (cuda_guard.py), so that a child may do
all three. Each connection to its socket carries one request: get the status, load or unload a
model, or run a job. The connection of a job is inherited by the horse that is forked for it. The
zygote keeps the connection open too, and reports on it how the horse ended.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

from ...jobs.compute import cache
from ...jobs.errors import Conflict, JobFailed, WarmdError
from ...jobs.files.shortage import Lacking, Shortage, no_process, shortage
from ...jobs.models.adapters import is_adapter
from ..host import memory
from ..host.channel import Channel, listen
from ..host.descendants import adopt_orphans, kill_children
from ..host.home import Home
from ..host.messages import (
    RETIRE,
    BootProgress,
    ChildReady,
    Failure,
    HorseExit,
    HorsePlan,
    LoadFolder,
    LocalModel,
    Malformed,
    Message,
    Model as ModelReply,
    ModelsLoaded,
    RunJob,
    Unloaded,
    UnloadModel,
    UseHorse,
    WantedModel,
    ZygoteSettings,
    ZygoteStatus,
    decode,
    encode,
)
from ..host.open_files import Acceptor
from ..host.parent_death import end_with_parent
from . import horse, zygote_memory
from .execution import lacking_outcome
from .horses import Horse, Horses
from .libraries import ENVIRONMENT, import_libraries, pause_openmp
from .models import Loaded, WarmModels
from .standby import Standby, Standbys

log = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 5.0  # for a caller to read a reply
_IDLE_S = 0.1  # without a request or a horse's end, before memory is moved or a standby forked
# Writes of the zygote while a horse lives split huge pages again: of 83 % of the memory that lie
# in huge pages 70 % are left after 5 and after 50 jobs, 45 % if models are loaded meanwhile.
_FORKS_PER_MOVE = 50


class Zygote:
    """The state of the process: loaded models and running horses."""

    def __init__(self, home: Home, budget_bytes: int, standbys: Iterable[HorsePlan] = ()) -> None:
        """`standbys`: one plan for each standby horse."""
        self.home = home
        self.models = WarmModels(budget_bytes, holds_files=True, digests=home.weight_digests)
        self.horses = Horses()
        self.standbys = Standbys(standbys)
        self.imports_s = 0.0
        self.started = time.time()
        self._selector = selectors.DefaultSelector()
        self._callers: set[Channel] = set()  # connections whose request has not arrived yet
        self._moving: Iterator[None] | None = None  # an unfinished move into huge pages
        self._idle_since = 0.0  # when the last horse ended
        self._forks = 0  # since the last move
        self._is_retiring = False  # another zygote has replaced it: it ends with its last horse

    def boot(self, models: list[WantedModel]) -> None:
        """Import the libraries and load the models; report progress to the supervisor on stdout.

        Raises Conflict or JobFailed for a required model that cannot be loaded.
        """
        begun = time.perf_counter()
        import_libraries(lambda name: _report(BootProgress("imports", False, name=name)))
        self.imports_s = time.perf_counter() - begun
        _report(
            BootProgress("imports", True, seconds=self.imports_s, memory_bytes=_resident_bytes())
        )
        # Adapters come last: they are served on the bases that are loaded before.
        for wanted in sorted(models, key=lambda wanted: is_adapter(_folder(wanted.model))):
            name = wanted.model.config.name
            _report(BootProgress("model", False, name=name))
            try:
                loaded = self.models.ensure(wanted.model.config, _folder(wanted.model), in_use=())
            except (Conflict, JobFailed) as error:
                if wanted.is_required:
                    raise
                log.error("zygote: %s", error)  # deleted or damaged since it was last loaded
                _report(BootProgress("model", True, name=name, problem=str(error)))
                continue
            _report(
                BootProgress(
                    "model",
                    True,
                    name=name,
                    seconds=loaded.seconds,
                    memory_bytes=loaded.size_bytes,
                )
            )
        gc.collect()
        gc.freeze()
        self._moving = zygote_memory.move()

    def serve(self, *, is_next: bool = False) -> None:
        """Handle requests until the process is killed, or after RETIRE without horses.

        `is_next`: listen where the supervisor expects the successor of another zygote.
        """
        adopt_orphans()
        home = self.home
        listener = listen(home.next_zygote_socket if is_next else home.zygote_socket)
        wake, waker = socket.socketpair()
        wake.setblocking(False)
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(RETIRE, self._retire)
        self._acceptor = Acceptor(listener)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(wake, selectors.EVENT_READ)
        self._own_sockets = [listener, wake, waker]
        self._report_loaded()
        _report(ChildReady())
        self._release_to_writers()  # for signals that came before `set_wakeup_fd`
        self._idle_since = time.monotonic()
        while not (self._is_retiring and self._is_done(listener)):
            ready = self._selector.select(self._timeout_s())
            if not ready:
                self._prepare()
            for key, _ in ready:
                if key.fileobj is wake:
                    with contextlib.suppress(BlockingIOError):
                        wake.recv(4096)
                    self._release_to_writers()
                    self._reap()
                elif key.fileobj is listener:
                    self._accept()
                else:
                    self._receive(cast(Channel, key.fileobj))

    def _retire(self, *_: Any) -> None:
        """Start to shut down: a successor has the socket, so there are no new connections."""
        self._is_retiring = True

    def _is_done(self, listener: socket.socket) -> bool:
        """Whether a retiring zygote can end: without horses and requests."""
        self._moving = None
        self.standbys.dismiss()
        self.standbys = Standbys(())  # no more are created
        self.horses.retire_all()
        waiting, _, _ = select.select([listener], [], [], 0)
        return not (waiting or self._callers or self.horses)

    def _accept(self) -> None:
        connection = self._acceptor.accept(self._refuse)
        if connection is None:
            return
        caller = Channel(connection)
        self._callers.add(caller)
        self._selector.register(caller, selectors.EVENT_READ)

    def _refuse(self, connection: socket.socket, lacking: Shortage) -> None:
        """Answer a request for which no descriptor is free."""
        connection.settimeout(_SEND_TIMEOUT_S)
        channel = Channel(connection)
        for request in channel.receive():
            if isinstance(request, RunJob):
                channel.send(lacking_outcome(request.job_id, lacking))
            else:
                channel.send(Failure.of(Lacking(lacking)))

    def _timeout_s(self) -> float | None:
        """Seconds to wait for a request before `_prepare`; None: nothing to prepare now."""
        if not self._may_move() and self.standbys.missing() is None:
            return None
        return max(0.0, self._idle_since + _IDLE_S - time.monotonic())

    def _may_move(self) -> bool:
        """Whether there is memory to move into huge pages.

        While a horse lives it would keep the old pages, and memory use would double.
        """
        return self._moving is not None and not self.horses

    def _prepare(self) -> None:
        """Do a small part of the preparation for the next jobs: requests must not wait long."""
        if self._moving is not None and self._may_move():
            self.standbys.dismiss()
            if next(self._moving, self) is self:
                self._moving = None
        elif (plan := self.standbys.missing()) is not None:
            self._fork_standby(plan)

    def _receive(self, caller: Channel) -> None:
        """Read from a caller without blocking, so that a slow caller delays no other."""
        requests = caller.receive()
        if not requests and not caller.closed_by_peer:
            return
        self._callers.remove(caller)
        self._selector.unregister(caller)
        if requests:
            self._handle(caller, requests[0])
        else:
            caller.close()

    def _handle(self, channel: Channel, request: Message) -> None:
        channel.sock.settimeout(_SEND_TIMEOUT_S)
        try:
            if isinstance(request, RunJob):
                self._fork(channel, request)
                return
            channel.send(self._reply(request))
        except BrokenPipeError:
            log.debug("zygote: request %s: the caller has gone", request.op)
        except (WarmdError, OSError) as error:
            lacking = shortage(error)
            if lacking is not None and isinstance(request, RunJob):
                log.warning("zygote: %s: %s", request.job_id, error)
                channel.send_nowait(lacking_outcome(request.job_id, lacking))
            elif isinstance(error, WarmdError):
                channel.send_nowait(Failure.of(error))
            else:
                log.warning("zygote: request %s: %s", request.op, error)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            log.warning("zygote: not a request: %r", error)
            channel.send_nowait(Failure(f"not a request: {error!r}", 2))
        channel.close()

    def _reply(self, request: Message) -> Message:
        match request:
            case LoadFolder():
                return ModelReply(self._ensure(request.model).to_json())
            case UnloadModel():
                kept_for = self.models.unload(request.name)
                self.horses.retire_outdated(self.models.loaded)
                self._report_loaded()
                return Unloaded(request.name, kept_for)
            case Malformed():
                raise ValueError(request.problem)
            case _:
                return ZygoteStatus(
                    pid=os.getpid(),
                    started=self.started,
                    imports_s=round(self.imports_s, 3),
                    memory_bytes=_resident_bytes(),
                    settled=self._moving is None,
                    budget_bytes=self.models.budget_bytes,
                    horses=self.horses.to_json(),
                    standbys=self.standbys.pids(),
                    models=[m.to_json() for m in self.models.loaded.values()],
                )

    def _ensure(self, model: LocalModel) -> Loaded:
        in_use = self.horses.models_in_use()
        found = self.models.loaded.get(model.config.name)
        try:
            loaded = self.models.ensure(model.config, _folder(model), in_use=in_use)
            if loaded is not found:
                self._moving = zygote_memory.move()
                self._report_loaded()
            return loaded
        finally:
            self.horses.retire_outdated(self.models.loaded)

    def _release_to_writers(self) -> None:
        """Unload models whose files other processes wait to write; horses have own leases."""
        for name in [name for name, m in self.models.loaded.items() if m.held.is_wanted()]:
            if name not in self.models.loaded:
                continue  # an adapter, unloaded with its base
            log.warning("zygote: %s: its files are being written to: the next use reloads it", name)
            self.models.drop(name)
            self.horses.retire_outdated(self.models.loaded)
            self._report_loaded()

    def _report_loaded(self) -> None:
        self.standbys.dismiss()  # their models are outdated
        _report(ModelsLoaded([model.config for model in self.models.loaded.values()]))

    def _fork(self, channel: Channel, request: RunJob) -> None:
        """Fork a horse for a job; it inherits the connection to the worker.

        If a resident horse of the worker has the model's base, the worker is referred to it.
        """
        model = self._ensure(request.model) if request.model is not None else None
        # Reported once, by the job that the model is reloaded for.
        is_model_changed = model is not None and model.is_reloaded
        if model is not None:
            model.is_reloaded = False
        found = None
        if model is not None and request.isolation == "resident":
            found = self.horses.serving(request.worker, self.models.root(model))
        if model is not None and found is not None:
            horse_pid, resident = found
            resident.note(model)
            channel.send(UseHorse(horse_pid, is_model_changed))
            channel.close()
            return
        request = replace(request, is_model_changed=is_model_changed, forked_at=time.monotonic())
        pid = self._hand_over(channel, request)
        if pid is None:

            def run() -> None:
                channel.sock.settimeout(None)
                horse.run_jobs(channel, request, self.models)

            try:
                pid = self._fork_process(run)
            except OSError as error:
                log.warning("zygote: %s: no horse: %s", request.job_id, error)
                lacking = no_process(str(error.strerror))
                channel.send(lacking_outcome(request.job_id, lacking))
                channel.close()
                return
        root = None if model is None else self.models.root(model)
        self.horses.add(pid, Horse(channel, request, model, root))

    def _hand_over(self, channel: Channel, request: RunJob) -> int | None:
        """Give a job to a standby horse; return its process id, None if there is none."""
        standby = self.standbys.take(request.plan) if request.isolation == "fork" else None
        if standby is None:
            return None
        channel.sock.settimeout(None)  # the same for the horse, which blocks
        if standby.hand_over(channel, request):
            return standby.pid
        channel.sock.settimeout(_SEND_TIMEOUT_S)
        return None

    def _fork_standby(self, plan: HorsePlan) -> None:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:  # no descriptor is free
            log.warning("zygote: no standby horse: %s", error)
            self.standbys.note_failure(plan)
            return

        def run() -> None:
            ours.close()
            horse.stand_by(theirs, plan, self.models)

        try:
            pid = self._fork_process(run)
        except OSError as error:
            log.warning("zygote: no standby horse: %s", error)
            ours.close()
            self.standbys.note_failure(plan)
        else:
            self.standbys.add(Standby(pid, plan, ours))
        finally:
            theirs.close()

    def _fork_process(self, run: Callable[[], None]) -> int:
        """Fork a process that runs a function and ends; return its id."""
        pause_openmp()
        self._forks += 1
        pid = os.fork()
        if pid == 0:
            self._become_horse(run)
        return pid

    def _become_horse(self, run: Callable[[], None]) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for sock in self._own_sockets:
                sock.close()
            self._acceptor.close()
            for other in (*self._callers, *(one.channel for one in self.horses)):
                other.close()
            self.standbys.close_in_fork()
            self._selector.close()
            run()
            status = 0
        except BaseException:
            log.exception("horse")
        finally:
            os._exit(status)  # never unwind into the zygote's stack

    def _reap(self) -> None:
        """Reap the horses that ended; report exit code and peak memory to their workers."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.standbys.note_death(pid)
            ended = self.horses.remove(pid)
            # All other children of this process are orphans of a horse that was killed.
            kill_children(spare=[*self.horses.pids(), *self.standbys.pids()])
            if ended is None:
                continue
            scale = 1 if sys.platform == "darwin" else 1024
            code = os.waitstatus_to_exitcode(status)
            ended.channel.send_nowait(HorseExit(code, usage.ru_maxrss * scale))
            ended.channel.close()
            self._idle_since = time.monotonic()
            if self._forks >= _FORKS_PER_MOVE:
                self._forks, self._moving = 0, zygote_memory.move()


def _resident_bytes() -> int:
    return memory.resident_bytes(os.getpid()) or 0


def _folder(model: LocalModel) -> Path:
    if model.folder is None:
        raise ValueError(f"model {model.config.name} has no folder")
    return Path(model.folder)


def _report(message: Message) -> None:
    os.write(1, encode(message))


def main() -> None:
    """Run as `python -m warmd.daemon.fork.zygote HOME PARENT`; reads ZygoteSettings from stdin."""
    end_with_parent(int(sys.argv[2]))
    home = Home(Path(sys.argv[1]))
    os.environ.update(ENVIRONMENT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGIO, lambda *_: None)  # wakes `serve`; see held_files
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    cache.keep_library_caches(home.code_caches)
    settings = decode(sys.stdin.buffer.read())
    assert isinstance(settings, ZygoteSettings)
    zygote = Zygote(home, settings.budget_bytes, settings.standbys)
    try:
        zygote.boot(settings.models)
    except WarmdError as error:
        _report(Failure.of(error))
        sys.exit(1)
    zygote.serve(is_next=settings.is_next)


if __name__ == "__main__":
    main()
