"""Reload: new processes take the place of the zygote and the workers, while jobs run.

Started after an upgrade of warmd or its libraries. The new zygote boots next to the old one, which
serves until then; if the new one fails, nothing has changed. Afterwards:

- The old zygote forks no more, and ends with its last horse.
- A worker with a resident horse is replaced when its successor is ready. It takes no more jobs, and
  ends with its last job.
- Another worker takes no more jobs, and its successor starts when its last job has ended: two
  trainings at once might not fit into memory.

All of them end with the supervisor, so a reload that is killed leaves nothing behind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ...jobs.errors import Conflict, WarmdError
from ..host import installed
from ..host.messages import BootProgress, ChildReady, Failure, Message, ModelsLoaded
from .children import Child, WorkerChild

log = logging.getLogger(__name__)

_CHECK_PERIOD_S = 60.0  # between two checks of the installed versions


class Upgrades:
    """Detects installed versions that differ from those with which the processes were started."""

    def __init__(self) -> None:
        self.own = installed.installed()  # of supervisor and gateway
        self.current = self.own  # of zygote and workers
        self._protocol = installed.protocol()
        self._logged: list[str] = []
        self._checked_at = time.monotonic()

    def changes(self) -> list[str]:
        """What was upgraded since zygote and workers started, in words."""
        return installed.changes(self.current, installed.refreshed(self.current))

    def own_changes(self) -> list[str]:
        """The same for warmd in the supervisor, which no reload replaces."""
        own = {"warmd": self.own["warmd"]}
        return installed.changes(own, installed.refreshed(own))

    def log_if_due(self) -> None:
        """Log an upgrade, once."""
        if time.monotonic() - self._checked_at < _CHECK_PERIOD_S:
            return
        self._checked_at = time.monotonic()
        found = self.changes()
        if found and found != self._logged:
            log.warning("upgraded since the daemon started: %s: `warmd reload`", ", ".join(found))
        self._logged = found

    def check_protocol(self) -> None:
        """Raise Conflict if new processes could not communicate with this one."""
        if installed.protocol() != self._protocol:
            raise Conflict(
                "warmd was upgraded to a version whose processes cannot work with the running "
                "supervisor: `warmd stop`, then `warmd start`; unfinished jobs resume"
            )


class Reloading:
    """The state of the latest reload, and the processes that leave."""

    def __init__(self, upgrades: Upgrades, start_zygote: Callable[[Child], None]) -> None:
        """`start_zygote` starts one that becomes ready without taking the other's place."""
        self.stage = "none"  # or requested, starting, workers, failed
        self.detail = ""  # what the new zygote does
        self.problem: str | None = None
        self.incoming: list[WorkerChild] = []  # each replaces another worker when it is ready
        self.retired: list[Child] = []
        self.zygote: Child | None = None  # while it starts
        self.models: ModelsLoaded | None = None  # what it holds
        self._upgrades = upgrades
        self._start_zygote = start_zygote

    def request(self) -> None:
        """Begin in the next iteration of the main loop. Raises Conflict."""
        if self.stage in ("requested", "starting") or self.incoming:
            raise Conflict("the daemon reloads already: see `warmd status`")
        self._upgrades.check_protocol()
        self.problem = None
        self.stage, self.detail = "requested", ""

    @property
    def is_starting(self) -> bool:
        """Whether a new zygote boots, and models must not be loaded or unloaded."""
        return self.stage in ("requested", "starting")

    def advance(self) -> Child | None:
        """Start the new zygote, or check on it; return it once it is ready."""
        if self.stage == "requested":
            log.info("reload: starting a new zygote")
            self._upgrades.current = installed.installed()
            self.stage, self.zygote, self.models = "starting", Child("zygote"), None
            try:
                self._start_zygote(self.zygote)
            except (WarmdError, OSError) as error:
                self.fail(str(error))
        if self.stage != "starting" or self.zygote is None:
            return None
        if self.zygote.has_died():
            process = self.zygote.process
            how = "the machine can start no process" if process is None else process.returncode
            self.fail(f"the new zygote ended ({how}) while it started")
        elif self.zygote.is_ready:
            ready, self.zygote = self.zygote, None
            return ready
        return None

    def handle(self, message: Message) -> None:
        """Handle a message of the new zygote."""
        match message:
            case Failure():
                self.fail(message.error)
            case ModelsLoaded():
                self.models = message
            case BootProgress():
                self.detail = " ".join(filter(None, (message.stage, message.name)))
            case ChildReady() if self.zygote is not None:
                self.zygote.is_ready = True

    def remove_ended(self, requeue: Callable[[WorkerChild], None]) -> None:
        """Forget the processes that have ended; `requeue` the jobs of workers among them."""
        for worker in list(self.incoming):
            if worker.has_died():
                self.incoming.remove(worker)
                self.retired.append(worker)
                self.problem = f"the new process of {worker.name} ended while it started"
        for child in list(self.retired):
            if child.has_died():
                if isinstance(child, WorkerChild):
                    requeue(child)  # raises while Redis is unreachable: the next iteration retries
                log.info("reload: the old process of %s has ended", child.name)
                self.retired.remove(child)

    def fail(self, problem: str) -> None:
        """Keep the old processes."""
        if self.stage == "failed":
            return  # the reason was reported before the process ended
        log.error("reload: %s: the daemon keeps its processes", problem)
        self.stage, self.problem = "failed", problem
        if self.zygote is not None and self.zygote.process is not None:
            self.zygote.process.kill()
            self.retired.append(self.zygote)
        self.zygote = None

    @property
    def leaving_workers(self) -> list[WorkerChild]:
        """The workers that have been replaced, or are to replace others."""
        return [child for child in self.children if isinstance(child, WorkerChild)]

    @property
    def children(self) -> list[Child]:
        """All processes of reloads; a stop of the daemon must end them as well."""
        return [*self.incoming, *self.retired, *([self.zygote] if self.zygote is not None else [])]
