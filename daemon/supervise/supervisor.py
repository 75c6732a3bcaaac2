"""The supervisor: starts Redis, zygote, workers and gateway, and restarts those that die.

It imports no torch and runs no job, so that a crash or an out-of-memory kill hits other processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial

import redis

from ... import __version__
from ...configs.config import DaemonConfig
from ...jobs.errors import Conflict, Unavailable, WarmdError
from ...jobs.files.atomic import recover
from ..groups import folder as groups
from ..host import installed
from ..host.home import Home
from ..host.messages import (
    RETIRE,
    Booted,
    BootProgress,
    ChildReady,
    Failure,
    JobsHeld,
    Message,
    ModelsLoaded,
)
from ..host.systemd import STOPPING, ServiceManager
from ..host.warm_set import WarmSet
from ..lifecycle.places import Places
from ..lifecycle.recover import Adopter, Adoption, has_lost
from ..queue import keys, totals
from ..queue.due import DueJobs
from ..queue.jobs import JobStore
from ..runs.rundir import remove_stale_staging
from ..store.remote import RemoteRuns
from .children import Child, WorkerChild
from .control_server import ControlServer
from .launching import Launcher, download_models
from .membership import Membership
from .orphans import Orphans
from .redis_service import RedisService
from .reloading import Reloading, Upgrades
from .retention import Retention
from .services import Services
from .shared_flags import SharedFlags
from .wakeups import Wakeups

log = logging.getLogger(__name__)

Report = Callable[[Message], None]
HandleRequest = Callable[["Supervisor", Message], Message]

_TICK_S = 1.0  # maximum duration of one wait; a message, a dead child or a signal ends it
_ADOPT_AGAIN_S = 15.0  # longer than a lease of a worker
_REDIS_TIMEOUT_S = 1.0  # for a reply; it blocks the main loop


class Supervisor:
    """One daemon."""

    def __init__(
        self,
        config: DaemonConfig,
        flags: SharedFlags,
        report: Report,
        handle: HandleRequest,
        manager: ServiceManager,
    ) -> None:
        """`report` receives the progress of the start, `handle` the control socket's requests.

        `manager`: pinged by the main loop, so that its watchdog restarts a daemon that hangs.
        """
        self.config = config
        self.report = report
        self._handle = partial(handle, self)
        self.home = Home(config.home)
        self.started = time.time()
        self.stopping: str | None = None  # "drain" or "now"
        self._flags = flags
        self._manager = manager
        self.looped_at = time.monotonic()  # latest iteration of the main loop
        self.failure: str | None = None
        runs = config.run_store
        remote = None if runs is None else RemoteRuns(self.home, runs)
        count_restart = self._count_restart
        self.redis = RedisService(config, self.home, remote, partial(count_restart, "redis"))
        self.url = self.redis.url
        self.connection = keys.connect_once(self.url, timeout_s=_REDIS_TIMEOUT_S)
        self.is_redis_down = False  # as of the last command
        self._wakeups = Wakeups()
        selector = self._wakeups.selector
        self._launcher = Launcher(config, self.home, self.url, selector)
        self.services = Services(
            config, self.home, self.url, selector, partial(count_restart, "gateway")
        )
        self.store = JobStore(self.connection)
        self._places = Places(self.home, self.store, remote)
        self._orphans = Orphans(self.store, self.home)
        self._due = DueJobs(self.store)
        self._checked_at = time.monotonic()  # heartbeats of the children
        self._retention = Retention(
            self._places,
            keep_s=config.keep_answers_s,
            most=config.max_answers,
            most_bytes=config.max_answers_bytes,
        )
        self.zygote = Child("zygote")
        self.workers = [WorkerChild(worker) for worker in config.workers]
        self.node = Membership(self.store, config, self.home, self.workers)
        self.upgrades = Upgrades()
        self.reloading = Reloading(self.upgrades, self._start_next_zygote)
        self.warm_set = WarmSet(self.home, config.models, flags.run_id)
        self.is_warm = False
        self._unwritten: dict[str, Callable[[], None]] = {}  # writes that met a full disk
        # The next adoption of jobs that Redis has lost: its time (monotonic), and the call.
        self._next_adoption: tuple[float, Callable[[], None]] | None = None

    # --- main loop --------------------------------------------------------------------------

    def run(self) -> int:
        """Run until a stop is requested; return the exit code.

        Raises WarmdError if it cannot start.
        """
        if self.config.runs_folder is not None:
            self.home.link_runs(self.config.runs_folder)
        self.home.create()
        lock = self.home.lock()
        try:
            self._wakeups.on_signals(self._on_stop_signal)
            if not self._flags.was_warm and self.config.run_store is not None:
                RemoteRuns(self.home, self.config.run_store, is_for_person=True).check_access()
            begun_at = time.time()
            self.report(self.redis.start(was_warm=self._flags.was_warm))
            self._report_repairs()
            self._write_state()
            self.warm_set.write()
            control = ControlServer(self.home.control_socket, self._handle)
            try:
                self._orphans.requeue_of_previous_run(self.url)
                self._adopt(begun_at)
                remove_stale_staging(self.home.runs)
                recover(self.home.cache)
                if self._flags.was_warm:
                    self._count_restart("supervisor")
                else:
                    self.node.join()
                self.node.find_gang_address()
                self.services.start_uploader_if_due()
                if self.workers:
                    self._start_zygote()
                else:
                    self._become_warm()
                self.services.start_gateway_if_due()
                self.services.start_notifier_if_due()
                groups.clean(self.home)
                self._retention.start(self.node.election.was_leader)
                while self.stopping is None:
                    self._tick()
                    if self.home.is_removed(lock):
                        # Nothing can be stored any more, and `warmd stop` cannot find this daemon.
                        self._fail(f"home: {self.home.path} was removed while the daemon ran")
                        self.stopping = "now"
                self._shut_down()
            finally:
                control.close()
        finally:
            self.redis.stop()
            os.close(lock)
        if self.failure is not None:
            raise Unavailable(self.failure)
        return 0

    def _report_repairs(self) -> None:
        for repair in self.redis.repairs:
            self.report(BootProgress("recovery", True, name="redis", note=repair.describe()))

    def _adopt(self, begun_at: float, earlier: Adoption | None = None) -> None:
        """Adopt the jobs that Redis has lost; `begun_at`: when Redis was started."""
        try:
            self._adopt_from(begun_at, earlier)
        except (OSError, redis.ResponseError) as error:  # the next start tries it again
            log.error("adoption: %s", error)

    def _adopt_from(self, begun_at: float, earlier: Adoption | None) -> None:
        with keys.connect(self.url) as connection:  # with a timeout for many jobs
            places = Places(self.home, JobStore(connection), self._places.remote)
            adopter = Adopter(places, is_shared=self.redis.embedded is None)
            found = adopter.run(begun_at=begun_at, repairs=self.redis.copies, earlier=earlier)
        if earlier is not None:
            return
        for line in found.describe():
            self.report(BootProgress("recovery", True, name="jobs", note=line))
        if found.missing:
            # A job whose horse still ran, without a claim in Redis, has ended by then.
            again_at = time.monotonic() + _ADOPT_AGAIN_S
            self._next_adoption = (again_at, partial(self._adopt, begun_at, found))

    def _adopt_if_due(self) -> None:
        due = self._next_adoption
        if due is not None and time.monotonic() >= due[0]:
            due[1]()  # raises RedisError: then it stays due
            if self._next_adoption is due:  # no second try for jobs that could not be restored
                self._next_adoption = None

    def stop(self, how: str) -> None:
        """Request the end: "drain" lets jobs save and requeues them, "now" kills them."""
        self._flags.set_stop_requested()
        if self.stopping != "now":
            self.stopping = how
        self._wakeups.wake()

    def reload(self) -> None:
        """Request that new processes replace zygote and workers. Raises Conflict."""
        if not self.is_warm or self.stopping is not None:
            raise Conflict("the daemon is starting or stopping: try again in a few seconds")
        self.reloading.request()
        self._wakeups.wake()

    def start_commands(self) -> None:
        """Request that the command server is started, unless it runs."""
        self.services.wants_commands = True
        self._wakeups.wake()

    def _on_stop_signal(self) -> None:
        self._flags.set_stop_requested()
        self.stopping = self.stopping or "drain"

    def _tick(self) -> None:
        """One iteration: handle the children's messages, restart dead ones, queue due jobs."""
        self._note_iteration()
        self._wakeups.wait(_TICK_S)
        if self.stopping is not None:
            return
        try:
            self._kill_hung_children()
            self.services.start_gateway_if_due()
            self.services.start_notifier_if_due()
            self.services.start_uploader_if_due()
            self.services.start_commands_if_due()
            self._restart_dead_children()
            self._advance_reload()
            self.upgrades.log_if_due()
            for what, write in list(self._unwritten.items()):
                self._store_patiently(what, write)
            self._adopt_if_due()
            self._take_part()
            if self.is_warm:
                self.services.start_groups_if_due()
            if self.is_redis_down:
                log.info("supervisor: Redis is reachable again")
            self.is_redis_down = False
        except redis.RedisError as error:
            if not self.is_redis_down:
                log.warning("supervisor: Redis is unreachable: %s", error)
            self.is_redis_down = True
        except WarmdError as error:
            self._fail(str(error))
        except Exception:  # a bug must not end the daemon and all its jobs
            log.exception("supervisor: iteration failed")

    def _take_part(self) -> None:
        """Act as a node: send heartbeats, lead if elected, leave if there is a reason to."""
        self.node.update(is_ready=self.is_warm)
        if self.node.election.is_leader():
            self._orphans.requeue_of_other_daemons()
            self._due.enqueue()
        if self.node.has_left():
            self.stop("drain")

    def _fail(self, reason: str) -> None:
        log.error("supervisor: %s", reason)
        self.failure = reason
        self.stopping = "drain"

    # --- starting ---------------------------------------------------------------------------

    def _start_zygote(self) -> None:
        self._start_zygote_as(self.zygote, is_next=False)

    def _start_next_zygote(self, child: Child) -> None:
        """Start the zygote of a reload, which takes the socket when it is ready."""
        self._start_zygote_as(child, is_next=True)

    def _start_zygote_as(self, child: Child, *, is_next: bool) -> None:
        def handle(message: Message) -> None:
            if child is self.zygote:
                self._on_zygote_message(message)
            elif child is self.reloading.zygote:
                self.reloading.handle(message)

        models = download_models(
            self.warm_set,
            must_have=not self._flags.was_warm,
            is_canceled=self._is_stopping,
            report=handle,
        )
        if self.stopping is None:
            self._launcher.start_zygote(child, models, handle, is_next=is_next)

    def _note_iteration(self) -> None:
        """Note, for probes and systemd's watchdog, that the main loop does not hang."""
        self.looped_at = time.monotonic()
        self._manager.ping_if_due()

    def _is_stopping(self) -> bool:
        """Polled while the main loop waits for a download, which may take hours."""
        self._note_iteration()
        return self.stopping is not None

    def _on_zygote_message(self, message: Message) -> None:
        match message:
            case Failure():
                self._fail(message.error)
            case ModelsLoaded():
                note = partial(self.warm_set.note_loaded, message.models)
                self._store_patiently("the loaded models", note)
            case BootProgress():
                self.report(message)
            case ChildReady():
                self.zygote.is_ready = True
                log.info("zygote: ready, pid %s", self.zygote.pid)
                for worker in self.workers:
                    if worker.process is None:
                        self._start_worker(worker)

    def _on_worker_message(self, worker: WorkerChild, message: Message) -> None:
        match message:
            case JobsHeld():
                worker.note_jobs(message)
            case ChildReady():
                worker.is_ready = True
                if worker in self.reloading.incoming:
                    self._replace_worker(worker)
                if not self.is_warm and all(worker.is_ready for worker in self.workers):
                    self._become_warm()

    def _become_warm(self) -> None:
        self.is_warm = True
        self._flags.set_warm()
        self.report(Booted(os.getpid()))

    def _start_worker(self, worker: WorkerChild) -> None:
        self._launcher.start_worker(
            worker,
            self.node.labels,
            self.node.jobs_left,
            partial(self._on_worker_message, worker),
        )

    # --- reloading --------------------------------------------------------------------------

    def _advance_reload(self) -> None:
        """Continue a reload; requeue the jobs of leaving processes that died."""
        ready = self.reloading.advance()
        if ready is not None:
            self._switch_to(ready)
        self.reloading.remove_ended(self._requeue_orphans)

    def _requeue_orphans(self, worker: WorkerChild) -> None:
        self._orphans.requeue(worker.redis_name, worker.config.queue)

    def _switch_to(self, zygote: Child) -> None:
        """Let a new zygote take the place of the old one, and replace all workers."""
        self.home.next_zygote_socket.rename(self.home.zygote_socket)
        assert self.zygote.process is not None
        self.zygote.process.send_signal(RETIRE)
        self.reloading.retired.append(self.zygote)
        self.zygote = zygote
        if self.reloading.models is not None:
            note = partial(self.warm_set.note_loaded, self.reloading.models.models)
            self._store_patiently("the loaded models", note)
        self._store_patiently("the state", self._write_state)
        for worker in self.workers:
            if worker.process is None or worker.has_died():
                continue  # it starts anew in any case
            if worker.config.isolation == "resident":
                successor = WorkerChild(worker.config)
                self.reloading.incoming.append(successor)
                self._start_worker(successor)
            else:
                worker.close()
        self.reloading.stage = "workers"
        log.info("reload: zygote ready, pid %s; workers follow", zygote.pid)

    def _replace_worker(self, successor: WorkerChild) -> None:
        self.reloading.incoming.remove(successor)
        names = [worker.name for worker in self.workers]
        index = names.index(successor.name)
        old, self.workers[index] = self.workers[index], successor
        successor.taken = old.taken
        old.close()
        if old.process is not None and not old.is_closing:  # still starting: it holds no job
            old.process.terminate()
        self.reloading.retired.append(old)

    # --- restarting -------------------------------------------------------------------------

    def _kill_hung_children(self) -> None:
        now = time.monotonic()
        # Time in which this process was suspended, for example with the machine, does not count.
        passed_s = min(now - self._checked_at, 2 * _TICK_S)
        self._checked_at = now
        for child in (*self.workers, *self.reloading.children, self.services.gateway):
            child.end_if_hung(passed_s)

    def _restart_dead_children(self) -> None:
        begun_at = time.time()
        if self.redis.restart_if_dead() and has_lost(self.home, self.redis.copies):
            self._next_adoption = (time.monotonic(), partial(self._adopt, begun_at))
        if self.zygote.has_died():
            self._check_death(self.zygote)
            self._start_zygote()
        for worker in self.workers:
            if worker.has_died():
                # Requeue first: it raises while Redis is unreachable, and the next iteration tries
                # again. The death must be counted only once.
                self._requeue_orphans(worker)
                self._restart_worker(worker)

    def _restart_worker(self, worker: WorkerChild) -> None:
        """Start a dead worker again, unless it has ended because the daemon leaves."""
        self._wakeups.handle_pending()
        if self.node.leaving is not None or self.node.jobs_left == 0:
            log.info("%s: ended", worker.name)
            worker.process = None
        else:
            if not worker.is_closing:  # else it has ended for a reload
                self._check_death(worker)
            self._start_worker(worker)

    def _count_restart(self, process: str) -> None:
        # For `/metrics` only: if Redis is too busy to count it, the iteration must not fail.
        with contextlib.suppress(redis.RedisError):
            totals.restarted(self.connection, process)

    def _check_death(self, child: Child) -> None:
        """Log the death of a child. Raises Unavailable if it is not worth restarting."""
        if child.is_refused:
            return  # it has not started yet
        assert child.process is not None
        self._wakeups.handle_pending()
        log.error("%s: ended (%s)", child.name, child.process.returncode)
        self._count_restart("worker" if isinstance(child, WorkerChild) else child.name)
        # A zygote that exits with an error during the first start would fail again. If it was
        # killed, or the daemon was ready before, a restart may succeed.
        has_failed = child.process.returncode >= 0 and not self._flags.was_warm
        has_failed = has_failed and child is self.zygote
        if child.cannot_stay_up() or has_failed:
            raise Unavailable(
                f"{child.name} does not stay up (last ended with {child.process.returncode}): "
                f"see {self.home.log}"
            )

    # --- stopping ---------------------------------------------------------------------------

    def _shut_down(self) -> None:
        log.info("supervisor: stopping (%s)", self.stopping)
        self._manager.notify(STOPPING)
        self._retention.stop()
        if self.services.gateway.process is not None:
            self.services.gateway.process.terminate()  # it ends its open requests with an error
        workers = [*self.workers, *self.reloading.leaving_workers]
        running = [w for w in workers if w.process is not None and w.process.poll() is None]
        if self.stopping == "drain":
            self._drain(running)
        for worker in running:
            worker.kill()
        self.services.kill()
        for child in (self.zygote, *self.reloading.children):
            child.kill()
        try:
            self.node.end()
            for worker in workers:
                if worker.redis_name:
                    self._requeue_orphans(worker)
        except redis.RedisError as error:
            log.warning("supervisor: jobs will be requeued at the next start: %s", error)

    def _drain(self, workers: list[WorkerChild]) -> None:
        """Let workers save and requeue their jobs, for `stop_grace_s` at most."""
        for worker in workers:
            assert worker.process is not None
            worker.process.terminate()
        deadline = time.monotonic() + self.config.stop_grace_s
        while any(not w.has_died() for w in workers) and time.monotonic() < deadline:
            if self.stopping == "now":
                break
            self._note_iteration()
            self._wakeups.wait(0.1)
            self._kill_hung_children()
            try:
                self.redis.restart_if_dead()  # workers need it to requeue their jobs
            except (WarmdError, OSError) as error:
                log.error("Redis: %s", error)

    def _store_patiently(self, what: str, write: Callable[[], None]) -> None:
        """Write a file of the home; on a full disk, again in each iteration until it succeeds."""
        try:
            write()
        except OSError as error:
            if what not in self._unwritten:
                log.error("supervisor: %s: not written, it is tried again: %s", what, error)
            self._unwritten[what] = write
        else:
            self._unwritten.pop(what, None)

    def _write_state(self) -> None:
        self.home.write_state(
            {
                "pid": os.getpid(),
                "version": __version__,
                "started": datetime.now().astimezone().isoformat(timespec="seconds"),
                "url": self.url,
                "control": str(self.home.control_socket),
                "installed": installed.to_json(self.upgrades.current),
            }
        )
