"""The supervisor: starts the server, the zygote and the workers, and replaces what dies.

It imports no torch and runs no job, so that it survives what kills the others.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

import redis

from ... import __version__
from ...configs.config import DaemonConfig, ModelConfig, redacted_url
from ...configs.memory import memory_bytes
from ...jobs.errors import Unavailable, WarmdError
from ..host import downloads
from ..host.home import Home
from ..host.warm_set import WarmSet
from ..queue import keys, runs_owner
from ..queue.due import Due
from ..queue.jobs import JobStore
from ..queue.lease import LEASE_S
from ..queue.workers import Roster
from ..runs.rundir import sweep
from .children import MOST_QUICK_KILLS, Child, GatewayChild, WorkerChild
from .control_server import ControlServer
from .redis_server import EmbeddedServer, find_binary
from .retention import Retention
from .shared_flags import Life

log = logging.getLogger(__name__)

Report = Callable[[dict[str, Any]], None]
AnswerRequest = Callable[["Supervisor", dict[str, Any]], dict[str, Any]]

_TURN_S = 1.0  # at most; a child that dies or a signal ends it sooner
_REPLY_S = 1.0  # for the server to reply: children and signals wait as long
_SWEEP_S = 60.0  # between two looks for jobs that only a lost worker knows of
_DEFAULT_BUDGET = 0.7  # of the machine's memory


class Supervisor:
    """One daemon."""

    def __init__(
        self, config: DaemonConfig, life: Life, report: Report, answer: AnswerRequest
    ) -> None:
        """`report` receives the progress of booting, `answer` the control socket's requests."""
        self.config = config
        self.report = report
        self._answer = partial(answer, self)
        self.home = Home(config.home)
        self.started = time.time()
        self.stopping: str | None = None  # "drain" or "now"
        self._life = life
        self.failure: str | None = None
        self.server: EmbeddedServer | None = None
        self._failed_revivals = 0  # of the server, in a row
        self.url = config.redis_url or self.home.server_url
        self.connection = keys.connect_once(self.url, timeout_s=_REPLY_S)
        self.is_server_away = False  # it did not reply the last time that it was asked
        self.store = JobStore(self.connection)
        self.roster = Roster(self.store)
        self._due = Due(self.store)
        self._looked_at = time.monotonic()  # at the children
        self._swept_at = float("-inf")
        self._retention = Retention(
            self.store,
            self.home,
            keep_s=config.keep_answers_s,
            most=config.max_answers,
            most_bytes=config.max_answers_bytes,
        )
        self.zygote = Child("zygote")
        self.workers = [WorkerChild(worker) for worker in config.workers]
        self.gateway = GatewayChild()
        self.warm_set = WarmSet(self.home, config.models, life.name)
        self._selector = selectors.DefaultSelector()
        self.is_warm = False

    # --- life -------------------------------------------------------------------------------

    def run(self) -> int:
        """Live until told to stop; return the exit code. Raises WarmdError when it cannot boot."""
        self.home.create()
        lock = self.home.lock()
        try:
            self._wake_on_signals()
            self._start_server()
            self._write_state()
            self.warm_set.write()
            control = ControlServer(self.home.control_socket, self._answer)
            try:
                self._bury_predecessors()
                sweep(self.home.runs)
                self._spawn_zygote()
                self._keep_gateway()
                self._retention.start()
                while self.stopping is None:
                    self._turn()
                self._shut_down()
            finally:
                control.close()
        finally:
            if self.server is not None:
                self.server.stop()
            os.close(lock)
        if self.failure is not None:
            raise Unavailable(self.failure)
        return 0

    def stop(self, how: str) -> None:
        """Ask for the end: "drain" lets jobs save and go back to their queue, "now" does not."""
        self._life.want_end()
        if self.stopping != "now":
            self.stopping = how
        os.write(self._waker.fileno(), b"x")

    def _wake_on_signals(self) -> None:
        wake, self._waker = socket.socketpair()
        wake.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, self._on_stop_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._selector.register(wake, selectors.EVENT_READ, lambda: wake.recv(4096))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))

    def _on_stop_signal(self, *_: Any) -> None:
        self._life.want_end()
        self.stopping = self.stopping or "drain"

    def _turn(self) -> None:
        """One turn of the loop: heed what the children say, replace the dead, move what is due."""
        self._listen(_TURN_S)
        if self.stopping is not None:
            return
        try:
            self._end_the_hung()
            self._keep_gateway()
            self._replace_the_dead()
            if self.is_warm:
                self._bury_foreign()
                self._due.move()
            self.is_server_away = False
        except redis.RedisError as error:
            self.is_server_away = True
            log.warning("supervisor: no server: %s", error)
        except WarmdError as error:
            self._fail(str(error))
        except Exception:  # a fault in one turn must not end the daemon and every job with it
            log.exception("supervisor: turn failed")

    def _listen(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def _fail(self, reason: str) -> None:
        log.error("supervisor: %s", reason)
        self.failure = reason
        self.stopping = "drain"

    # --- starting ---------------------------------------------------------------------------

    def _start_server(self) -> None:
        begun = time.perf_counter()
        if self.config.redis_url is None:
            self.server = EmbeddedServer(self.home, find_binary(self.config.server_binary))
            self.server.start()
        with keys.connect(self.url) as connection:  # which may be far away
            check_server(connection, self.config.redis_url)
            if self.server is None:
                runs_owner.claim(connection, self.home)
            info: Any = connection.info("memory")
        self.report(
            {
                "stage": "server",
                "name": "embedded" if self.server else "external",
                "seconds": time.perf_counter() - begun,
                "memory_bytes": info.get("used_memory_rss"),
                "done": True,
            }
        )

    def _spawn_zygote(self) -> None:
        models = []
        for model in self.warm_set.models():
            is_required = self.warm_set.is_required(model.name)
            try:
                folder = downloads.folder_of(model, over=lambda: self.stopping is not None)
                placed = {"config": model.__dict__, "folder": str(folder)}
                models.append({**placed, "is_required": is_required})
            except WarmdError as error:
                if self.stopping is not None:
                    return
                if is_required and not self._life.was_warm:
                    raise
                log.error("zygote: %s", error)
        budget = self.config.memory_budget_bytes or int(memory_bytes() * _DEFAULT_BUDGET)
        self.zygote.start(
            self._selector,
            "warmd.daemon.fork.zygote",
            self.home,
            {"budget_bytes": budget, "models": models},
            tells=self._on_zygote,
        )

    def _on_zygote(self, message: dict[str, Any]) -> None:
        if "error" in message:
            self._fail(message["error"])
            return
        if message["stage"] == "loaded":
            self.warm_set.note_loaded(ModelConfig(**model) for model in message["models"])
            return
        if message["stage"] != "ready":
            self.report(message)
            return
        self.zygote.is_ready = True
        log.info("zygote: ready, pid %s", self.zygote.pid)
        for worker in self.workers:
            if worker.process is None:
                self._spawn_worker(worker)

    def _on_worker(self, worker: WorkerChild) -> None:
        worker.is_ready = True
        if not self.is_warm and all(worker.is_ready for worker in self.workers):
            self.is_warm = True
            self._life.note_warm()
            self.report({"stage": "ready", "pid": os.getpid(), "done": True})

    def _keep_gateway(self) -> None:
        if self.config.http_port is not None and self.gateway.must_start():
            self.gateway.start(
                self._selector,
                "warmd.daemon.gateway",
                self.home,
                {"config": self.config.to_json(), "url": self.url},
                tells=self.gateway.hear,
            )

    def _spawn_worker(self, worker: WorkerChild) -> None:
        worker.redis_name = f"{worker.name}:{self.home.key}:{secrets.token_hex(3)}"
        worker.start(
            self._selector,
            "warmd.daemon.work.worker",
            self.home,
            {
                "config": worker.config.__dict__,
                "url": self.url,
                "name": worker.redis_name,
                # The embedded server has no workers but ours, whose death is seen.
                "is_shared": self.server is None,
                "lease_s": LEASE_S,
            },
            tells=lambda _: self._on_worker(worker),
        )

    # --- watching ---------------------------------------------------------------------------

    def _revive_server(self) -> None:
        if self.server is not None and self.server.process is not None:
            code = self.server.process.poll()
            if code is not None:
                log.error("server: ended (%s), starting it again", code)
                try:
                    self.server.start()
                except Unavailable:
                    self._failed_revivals += 1
                    if self._failed_revivals >= MOST_QUICK_KILLS:
                        raise
                else:
                    self._failed_revivals = 0

    def _end_the_hung(self) -> None:
        now = time.monotonic()
        # Time in which this process was suspended, as in all of a machine's sleep, is no silence.
        passed_s = min(now - self._looked_at, 2 * _TURN_S)
        self._looked_at = now
        for child in (*self.workers, self.gateway):
            child.end_if_hung(passed_s)

    def _replace_the_dead(self) -> None:
        self._revive_server()
        if self.zygote.has_died():
            self._check_death(self.zygote)
            self._spawn_zygote()
        for worker in self.workers:
            if worker.has_died():
                # First what may fail for a server that is away: a death counts once.
                self.bury(worker.redis_name, worker.config.queue)
                self._check_death(worker)
                self._spawn_worker(worker)

    def _check_death(self, child: Child) -> None:
        assert child.process is not None
        while self._selector.select(0):  # its last words
            self._listen(0)
        log.error("%s: ended (%s)", child.name, child.process.returncode)
        # A zygote that gives up at the first start will do so again; one that is killed may not,
        # nor may the one of a daemon that was warm before its supervisor was killed.
        gave_up = child.process.returncode >= 0 and not self._life.was_warm
        gave_up = gave_up and child is self.zygote
        if child.cannot_stay_up() or gave_up:
            raise Unavailable(
                f"{child.name} does not stay up (last ended with {child.process.returncode}): "
                f"see {self.home.log}"
            )

    def bury(self, name: str, queue: str) -> None:
        """Return what a dead worker held to its queue."""
        _log_returned(self.roster.bury(name, queue), name)

    def _bury_predecessors(self) -> None:
        # Whatever was here before us is dead: one daemon a home, and its processes end with it.
        with keys.connect(self.url) as connection:
            roster = Roster(JobStore(connection))
            for name, queue in roster.workers().items():
                if name.split(":")[1] == self.home.key:
                    _log_returned(roster.bury(name, queue), name)

    def _bury_foreign(self) -> None:
        for name, queue in self.roster.silent().items():
            if name.split(":")[1] != self.home.key:
                self.bury(name, queue)
        if time.monotonic() - self._swept_at > _SWEEP_S:
            _log_returned(self.roster.sweep(), "that held it")
            self._swept_at = time.monotonic()

    # --- stopping ---------------------------------------------------------------------------

    def _shut_down(self) -> None:
        log.info("supervisor: stopping (%s)", self.stopping)
        self._retention.stop()
        if self.gateway.process is not None:
            self.gateway.process.terminate()  # it tells those that wait
        living = [w for w in self.workers if w.process is not None and w.process.poll() is None]
        if self.stopping == "drain":
            for worker in living:
                assert worker.process is not None
                worker.process.terminate()
            deadline = time.monotonic() + self.config.stop_grace_s
            while any(not w.has_died() for w in living) and time.monotonic() < deadline:
                if self.stopping == "now":
                    break
                self._listen(0.1)
                self._end_the_hung()
                try:
                    self._revive_server()  # the workers cannot give their jobs back without one
                except (WarmdError, OSError) as error:
                    log.error("server: %s", error)
        for worker in living:
            assert worker.process is not None
            if worker.process.poll() is None:
                worker.process.kill()
                worker.process.wait()
        for child in (self.zygote, self.gateway):
            if child.process is not None:
                child.process.kill()
                child.process.wait()
        try:
            for worker in self.workers:
                if worker.redis_name:
                    self.bury(worker.redis_name, worker.config.queue)
        except redis.RedisError as error:
            log.warning("supervisor: what the workers held returns at the next start: %s", error)

    def _write_state(self) -> None:
        self.home.write_state(
            {
                "pid": os.getpid(),
                "version": __version__,
                "started": datetime.now().astimezone().isoformat(timespec="seconds"),
                "url": self.url,
                "control": str(self.home.control_socket),
            }
        )


def _log_returned(job_ids: list[str], worker: str) -> None:
    for job_id in job_ids:
        log.warning("%s: queued again, worker %s is dead", job_id, worker)


def check_server(connection: redis.Redis, url: str | None) -> None:
    """Raise Unavailable unless the server answers and is new enough."""
    where = redacted_url(url) if url else "the embedded server"
    try:
        info: Any = connection.info("server")
    except redis.RedisError as error:
        raise Unavailable(f"no server at {where}: {error}") from error
    version = tuple(int(part) for part in info["redis_version"].split(".")[:2])
    if version < (6, 2):
        raise Unavailable(f"{where} is version {info['redis_version']}: warmd needs 6.2 or later")
