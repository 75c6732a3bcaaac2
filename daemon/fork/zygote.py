"""The zygote: holds every library and every warm model, and forks the work horses.

It has one thread, never computes and never touches CUDA, so that a child may do all three. Each
connection to its socket carries one request: a status, a model in or out, or a job. A job's
connection passes to the horse that is forked for it; the zygote keeps an end too and reports on it
how the horse died.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import orjson

from ...configs.config import ModelConfig
from ...jobs import KINDS, import_all
from ...jobs.errors import Conflict, JobFailed, WarmdError
from ..host import memory
from ..host.channel import Channel, listen
from ..host.descendants import adopt_orphans, kill_children
from ..host.home import Home
from ..host.parent_death import end_with_parent
from . import horse, zygote_memory
from .models import Loaded, WarmModels

log = logging.getLogger(__name__)

# Read by the libraries when they are imported.
ENVIRONMENT = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # ask NVML for GPUs: a context here would break the forks
    "TOKENIZERS_PARALLELISM": "false",  # its thread pool would hang in a child
    "OPENBLAS_NUM_THREADS": "1",
    # With fewer threads than torch asks OpenMP for, products of oneDNN have rows of garbage.
    "OMP_DYNAMIC": "false",
    "OMP_THREAD_LIMIT": "4294967295",  # none
    # Who waits for another thread looks for 0.15 ms whether it is done, not for 7.5, and then
    # sleeps: beside other programs that thread may lack the very core which the looking takes.
    "GOMP_SPINCOUNT": "5000",
    "HF_HUB_OFFLINE": "1",  # weights are fetched before they come here
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}

_QUIET_S = 0.1  # without a horse, before memory is moved into huge pages
# What the zygote writes while a horse lives is split into small pages again: of 83 % that lie in
# huge ones 70 % are left after 5 jobs and after 50, 45 % where models came and went meanwhile.
_FORKS_PER_MOVE = 50


class Zygote:
    """The process' state: models, and the horses that live."""

    def __init__(self, home: Home, budget_bytes: int) -> None:
        self.home = home
        self.models = WarmModels(budget_bytes, holds_files=True, digests=home.weight_digests)
        self.horses: dict[int, Horse] = {}
        self.imports_s = 0.0
        self.started = time.time()
        self._selector = selectors.DefaultSelector()
        self._callers: set[Channel] = set()  # connected, with their request still to come
        self._moving: Iterator[None] | None = None  # the rest of a move into huge pages
        self._quiet_since = 0.0  # when the last horse ended
        self._forks = 0  # since memory was moved last

    def boot(self, models: list[dict[str, Any]]) -> None:
        """Import the libraries and load the wanted models, telling the supervisor on stdout.

        Raises JobFailed for one that cannot be loaded and is required.
        """
        begun = time.perf_counter()
        import_libraries(lambda name: _tell(stage="imports", name=name, done=False))
        self.imports_s = time.perf_counter() - begun
        _tell(stage="imports", seconds=self.imports_s, memory_bytes=_resident(), done=True)
        for model in models:
            config = ModelConfig(**model["config"])
            _tell(stage="model", name=config.name, done=False)
            try:
                loaded = self.models.ensure(config, Path(model["folder"]), in_use=())
            except (Conflict, JobFailed) as error:
                if model["is_required"]:
                    raise
                log.error("zygote: %s", error)  # loaded once, and gone or spoilt since
                continue
            _tell(
                stage="model",
                name=config.name,
                seconds=loaded.seconds,
                memory_bytes=loaded.size_bytes,
                done=True,
            )
        gc.collect()
        gc.freeze()
        self._moving = zygote_memory.move()

    def serve(self) -> None:
        """Answer requests until the supervisor says to stop (SIGTERM) and no horse is left."""
        adopt_orphans()
        listener = listen(self.home.zygote_socket)
        wake, waker = socket.socketpair()
        wake.setblocking(False)
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(wake, selectors.EVENT_READ)
        self._own_sockets = [listener, wake, waker]
        self._tell_loaded()
        _tell(stage="ready", memory_bytes=_resident())
        self._let_write()  # to what was loaded while there was nobody to wake
        self._quiet_since = time.monotonic()
        while True:
            ready = self._selector.select(self._patience_s())
            if not ready:
                self._move_some()
            for key, _ in ready:
                if key.fileobj is wake:
                    with contextlib.suppress(BlockingIOError):
                        wake.recv(4096)
                    self._let_write()
                    self._reap()
                elif key.fileobj is listener:
                    connection, _ = listener.accept()
                    caller = Channel(connection)
                    self._callers.add(caller)
                    self._selector.register(caller, selectors.EVENT_READ)
                else:
                    self._hear(cast(Channel, key.fileobj))

    def _patience_s(self) -> float | None:
        """How long to wait for a request before memory is moved; None when there is no need.

        A horse that lives would keep the memory that is moved, and there would be two of it.
        """
        if self._moving is None or self.horses:
            return None
        return max(0.0, self._quiet_since + _QUIET_S - time.monotonic())

    def _move_some(self) -> None:
        """Move a few more pages; a request waits for no more than these."""
        if self._moving is not None and next(self._moving, self) is self:
            self._moving = None

    def _hear(self, caller: Channel) -> None:
        """Read what a caller has sent; one that is slow to send its request delays nobody."""
        requests = caller.receive()
        if not requests and not caller.closed_by_peer:
            return
        self._callers.remove(caller)
        self._selector.unregister(caller)
        if requests:
            self._answer(caller, requests[0])
        else:
            caller.close()

    def _answer(self, channel: Channel, request: dict[str, Any]) -> None:
        channel.sock.settimeout(5.0)
        try:
            if request["op"] == "run":
                self._fork(channel, request)
                return
            channel.send(self._reply(request))
        except WarmdError as error:
            channel.send_if_heard({"error": str(error), "exit_code": error.exit_code})
        except BrokenPipeError:
            log.debug("zygote: request %s: nobody waits for the answer", request.get("op"))
        except OSError as error:
            log.warning("zygote: request %s: %s", request.get("op"), error)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            log.warning("zygote: no request: %r", error)
            channel.send_if_heard({"error": f"not a request: {error!r}", "exit_code": 2})
        channel.close()

    def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["op"]:
            case "load":
                return self._ensure(request["model"]).to_json()
            case "unload":
                self.models.unload(request["name"])
                self._retire_residents()
                self._tell_loaded()
                return {"unloaded": request["name"]}
            case _:
                return {
                    "pid": os.getpid(),
                    "started": self.started,
                    "imports_s": round(self.imports_s, 3),
                    "memory_bytes": _resident(),
                    "settled": self._moving is None,
                    "budget_bytes": self.models.budget_bytes,
                    "horses": [h.to_json(pid) for pid, h in self.horses.items()],
                    "models": [m.to_json() for m in self.models.loaded.values()],
                }

    def _ensure(self, model: dict[str, Any]) -> Loaded:
        config = ModelConfig(**model["config"])
        # A resident one may have nothing to do: when its model has to go, so must it.
        users = [horse for horse in self.horses.values() if not horse.is_resident]
        in_use = {horse.model for horse in users if horse.model is not None}
        found = self.models.loaded.get(config.name)
        try:
            loaded = self.models.ensure(config, Path(model["folder"]), in_use=in_use)
            if loaded is not found:
                self._moving = zygote_memory.move()
                self._tell_loaded()
            return loaded
        finally:
            self._retire_residents()

    def _let_write(self) -> None:
        """Unload models to whose files somebody waits to write; horses have leases of their own."""
        for name in [name for name, m in self.models.loaded.items() if m.held.is_wanted()]:
            log.warning(
                "zygote: the files of %s are written to: its next use reads them again", name
            )
            self.models.unload(name)
            self._retire_residents()
            self._tell_loaded()

    def _tell_loaded(self) -> None:
        models = [model.config.__dict__ for model in self.models.loaded.values()]
        _tell(stage="loaded", models=models)

    def _retire_residents(self) -> None:
        """Tell the workers of resident horses whose model is no longer the warm one."""
        loaded_at = {name: model.loaded_at for name, model in self.models.loaded.items()}
        for user in self.horses.values():
            is_current = user.model is None or loaded_at.get(user.model) == user.loaded_at
            if user.is_resident and not is_current:
                user.channel.send_if_heard({"retire": True})

    def _fork(self, channel: Channel, request: dict[str, Any]) -> None:
        """Fork a horse for a job; the connection is its line to the worker."""
        model = self._ensure(request["model"]) if request.get("model") is not None else None
        # Of the job that the model is read again for; others say which weights they have, too.
        request["is_model_changed"] = model is not None and model.is_again
        if model is not None:
            model.is_again = False
        pause_openmp()
        request["forked_at"] = time.monotonic()
        self._forks += 1
        pid = os.fork()
        if pid == 0:
            self._become_horse(channel, request)
        self.horses[pid] = Horse(channel, request, model)

    def _become_horse(self, channel: Channel, request: dict[str, Any]) -> None:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for sock in self._own_sockets:
                sock.close()
            for other in (*self._callers, *(horse.channel for horse in self.horses.values())):
                other.close()
            self._selector.close()
            channel.sock.settimeout(None)
            horse.run_jobs(channel, request, self.models)
            status = 0
        except BaseException:
            log.exception("horse: %s", request.get("job_id"))
        finally:
            os._exit(status)  # never unwind into the zygote's own stack

    def _reap(self) -> None:
        """Report every horse that ended, with what it took, to the worker that waits for it."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            ended = self.horses.pop(pid, None)
            # What else is below this process was below a horse that was killed.
            kill_children(spare=self.horses)
            if ended is None:
                continue
            scale = 1 if sys.platform == "darwin" else 1024
            ended.channel.send_if_heard(
                {
                    "exit": os.waitstatus_to_exitcode(status),
                    "peak_bytes": usage.ru_maxrss * scale,
                }
            )
            ended.channel.close()
            self._quiet_since = time.monotonic()
            if self._forks >= _FORKS_PER_MOVE:
                self._forks, self._moving = 0, zygote_memory.move()


class Horse:
    """A living horse, as the zygote knows it."""

    def __init__(self, channel: Channel, request: dict[str, Any], model: Loaded | None) -> None:
        self.channel = channel
        self.model = model.config.name if model is not None else None
        self.loaded_at = model.loaded_at if model is not None else None
        self.is_resident = request["isolation"] == "resident"
        self.worker = request["worker"]

    def to_json(self, pid: int) -> dict[str, Any]:
        return {"pid": pid, "worker": self.worker, "memory_bytes": memory.resident_bytes(pid)}


def import_libraries(on_import: Callable[[str], None] = lambda name: None) -> None:
    """Import all that a job needs, so that no horse has to. Leaves one thread behind.

    `on_import` is told what is imported next.
    """
    on_import("torch")
    import torch

    torch.set_num_threads(1)  # before the first operation: see pause_openmp
    on_import("transformers")
    import tqdm
    import transformers

    tqdm.tqdm.monitor_interval = 0  # or a thread starts with the first progress bar
    transformers.utils.logging.disable_progress_bar()
    for name in (
        "AutoConfig",
        "AutoModelForCausalLM",
        "AutoTokenizer",
        "Trainer",
        "LlamaForCausalLM",
    ):
        getattr(transformers, name)
    for kind in KINDS:
        on_import(kind)
        import_all(kind)
    with torch.profiler.record_function("first"):  # imports a module, which a job's step would
        pass
    from ...jobs.compute.levels import levels

    on_import("kernels")
    levels()  # measured once on a machine, by one thread: no horse has to
    torch.cuda.is_available()  # by NVML, see ENVIRONMENT; the first time costs, here not there


def pause_openmp() -> None:
    """Make libgomp forget its threads, which a child would wait for, for ever.

    A no-op as long as nothing was computed here; it is the second lock on that door.
    """
    global _gomp
    if sys.platform != "linux":
        return  # no libgomp there
    if _gomp is None:
        maps = Path("/proc/self/maps").read_text().splitlines()
        paths = {line.split()[-1] for line in maps if "libgomp" in line}
        _gomp = [ctypes.CDLL(path) for path in paths]
    for library in _gomp:
        library.omp_pause_resource_all(1)


_gomp: list[ctypes.CDLL] | None = None


def _resident() -> int:
    return memory.resident_bytes(os.getpid()) or 0


def _tell(**message: Any) -> None:
    os.write(1, orjson.dumps(message) + b"\n")


def main() -> None:
    """Run as `python -m warmd.daemon.fork.zygote HOME PARENT`, with the models on stdin as JSON."""
    end_with_parent(int(sys.argv[2]))
    os.environ.update(ENVIRONMENT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGIO, lambda *_: None)  # it wakes `serve`; see held_files
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    request = orjson.loads(sys.stdin.buffer.read())
    zygote = Zygote(Home(Path(sys.argv[1])), request["budget_bytes"])
    try:
        zygote.boot(request["models"])
    except WarmdError as error:
        _tell(error=str(error))
        sys.exit(1)
    zygote.serve()


if __name__ == "__main__":
    main()
