"""The client's connection to Redis, and the error for a Redis that cannot be reached."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import redis

from ...configs.config import DaemonConfig
from ...jobs.errors import SpecError, Unavailable
from ...jobs.files.shortage import lacks_space
from ...jobs.ids import is_job_id
from ..host.home import Home
from ..lifecycle.find import Lookup, Offline
from ..lifecycle.places import Places
from ..queue import key_prefix, keys
from ..queue.jobs import JobStore
from ..queue.reasons import reason
from ..runs.rundir import RunDir

if TYPE_CHECKING:
    from ..store.reading import OnOutdated, ReadableRuns
    from ..store.remote import RemoteRuns
    from .trained import FetchReport

log = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])
Found = TypeVar("Found")

_REFUSALS = ("MISCONF", "NOREPLICAS")  # the disk is full, or too few replicas are connected
# Memory is full, or this is a replica: redis-py removes these words from the message.
_REFUSED = (redis.exceptions.OutOfMemoryError, redis.exceptions.ReadOnlyError)


class _Part(Protocol):
    """A part of a client: its jobs, its groups, its nodes or its models."""

    _client: Connection


def needs_redis(method: Method) -> Method:
    """Decorator: run a method of a part of a client in `Connection.asking`."""

    @wraps(method)
    def wrapper(self: _Part, *args: Any, **kwargs: Any) -> Any:
        return self._client.asking(lambda: method(self, *args, **kwargs))

    return cast(Method, wrapper)


class Connection:
    """A home and its Redis, which all parts of a client use."""

    fetch_report: FetchReport | None = None  # receives the progress of models that are fetched
    on_note: Callable[[str], None] | None = None  # receives notes on what a submission chooses

    def __init__(
        self,
        config: DaemonConfig,
        *,
        on_offline: Callable[[], None] | None = None,
        on_outdated: OnOutdated = log.warning,
    ) -> None:
        """`on_offline` is called once, when no daemon runs and run directories are read instead.

        Without it, reading methods raise Unavailable then. `on_outdated`: called if data may be out
        of date, because the run store is unreachable.
        """
        self.config = config
        self.home = Home(config.home)
        if config.runs_folder is not None:
            self.home.link_runs(config.runs_folder)
        self.is_offline = False
        self._has_checked_keys = False
        self._on_offline = on_offline
        self._on_outdated = on_outdated

    @cached_property
    def url(self) -> str:
        """The URL of Redis: configured, or as last used by the daemon of this home."""
        if self.config.redis_url is not None:
            return self.config.redis_url
        state = self.home.read_state()
        return state["url"] if state is not None else self.home.redis_url

    @cached_property
    def connection(self) -> redis.Redis:
        """Retries while Redis restarts, but not where no daemon runs that would restart it."""
        if self.url == self.home.redis_url and not self.home.is_locked():
            return keys.connect_once(self.url)
        return keys.connect_for_person(self.url)

    @cached_property
    def store(self) -> JobStore:
        return JobStore(self.connection)

    @cached_property
    def places(self) -> Places:
        return Places(self.home, self.store, self.remote)

    @cached_property
    def remote(self) -> RemoteRuns | None:
        """The run store, if run directories are kept in one."""
        url = self.config.run_store
        if url is None:
            return None
        from ..store.remote import RemoteRuns  # few homes have one

        return RemoteRuns(self.home, url, is_for_person=True)

    @cached_property
    def readable(self) -> ReadableRuns | None:
        """The run store for commands that only read; None as in `remote`."""
        if self.remote is None:
            return None
        from ..store.reading import ReadableRuns

        return ReadableRuns(self.remote, self.home.runs, self._on_outdated)

    @cached_property
    def lookup(self) -> Lookup:
        return Lookup(self.places, self.readable)

    def asking(self, ask: Callable[[], Found]) -> Found:
        """Return what a function that uses Redis returns.

        Raises Unavailable, with advice, if Redis is unreachable or refuses what it is asked for,
        Conflict if this process would look for the jobs under other keys than the daemon, and
        SpecError if the disk of the home is full. Nothing runs here after `ask`: an interrupt
        would hide that it was done.
        """
        try:
            self.check_keys()
            return ask()
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise self.unavailable(error) from error
        except redis.exceptions.NoPermissionError as error:
            raise Unavailable(reason(error, self.url)) from error
        except redis.ResponseError as error:
            if isinstance(error, _REFUSED) or str(error).startswith(_REFUSALS):
                raise Unavailable(f"Redis takes no changes: {error}") from error
            raise
        except OSError as error:
            if lacks_space(error):
                raise SpecError("home", f"cannot be written: {error}") from error
            raise

    def read(self, ask: Callable[[Lookup | Offline], Found]) -> Found:
        """Ask Redis and run directories; these alone if no daemon runs and the caller wants that.

        Raises what `asking` raises.
        """
        if not self.is_offline:
            try:
                return self.asking(lambda: ask(self.lookup))
            except Unavailable:
                if not self.go_offline():
                    raise
        return ask(Offline(self.home.runs))

    def go_offline(self) -> bool:
        """Read run directories from now on, if the caller wants that and no daemon runs."""
        if self._on_offline is None or self.home.is_locked() or not self.home.runs.is_dir():
            return False
        self.is_offline = True
        self._on_offline()
        return True

    def now(self) -> float:
        """The time in unix seconds by the clock of jobs and events, which is that of Redis.

        This machine's where Redis cannot be reached.
        """
        if not self.is_offline:
            with suppress(redis.RedisError):
                return self.store.shared_clock.now()
        return time.time()

    def check_keys(self) -> None:
        """Raise Conflict if RQ's keys have another prefix here than in Redis.

        Without a Redis there is nothing to check: what needs one reports that it is missing.
        """
        if not self._has_checked_keys and not self.is_offline:
            with suppress(redis.ConnectionError):
                key_prefix.check(self.connection)
                self._has_checked_keys = True

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if "connection" in self.__dict__:
            self.connection.close()

    def unavailable(self, error: redis.RedisError) -> Unavailable:
        """Describe why Redis cannot be used, and what to do."""
        if self.url != self.home.redis_url:
            return Unavailable(reason(error, self.url))
        is_running = self.home.is_locked()
        if (folder := self.home.full_folder_of_redis()) is not None:
            effect = "Redis waits for space" if is_running else "Redis has ended"
            then = "" if is_running else ", and run `warmd start`"
            how = ""
            with suppress(FileNotFoundError):  # a new home, or the disk of `runs` is not mounted
                if os.stat(folder).st_dev == os.stat(self.home.runs).st_dev:
                    how = ", for example with `warmd checkpoints prune`"
            return Unavailable(
                f"the disk of {folder} is full, and {effect}: free some space{how}{then}"
            )
        if isinstance(error, redis.TimeoutError):
            return Unavailable(reason(error, self.url))
        if is_running:
            return Unavailable(
                f"the daemon in {self.home.path} runs, but its Redis does not reply: {error}; "
                f"{self.home.log} says why"
            )
        return Unavailable(f"no daemon runs in {self.home.path}: start it with `warmd start`")

    def find(self, text: str | None, *, is_training: bool = False) -> str:
        """Return the id of the job that an id or a unique prefix of one names.

        `-` or None is the latest job submitted from the command line, never an HTTP request; with
        `is_training`, the latest training job. Raises SpecError and NotFound.
        """
        return self.lookup.find(text, is_training=is_training)

    def rundir(self, job_id: str) -> RunDir:
        """Return the run directory of a job for reading, perhaps without weights.

        If the run store cannot be reached, the files are those that this machine has.
        """
        if self.readable is not None and is_job_id(job_id):
            self.readable.refresh(job_id)
        return RunDir.open(self.home.runs, job_id)
