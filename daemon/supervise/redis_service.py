"""The Redis of one daemon: an embedded process, restarted when it dies, or an external one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import redis

from ...configs.config import DaemonConfig
from ...jobs.errors import Unavailable
from ...jobs.files.shortage import Lacking
from ..host.backoff import backoff_s
from ..host.home import Home
from ..host.messages import BootProgress
from ..lifecycle import runs_owner
from ..queue import key_prefix, keys
from ..queue.clocks import clock
from ..store.bucket import StoreUnavailable
from ..store.remote import RemoteRuns
from . import aof_repair
from .aof_repair import Repair
from .children import MAX_QUICK_KILLS
from .redis_server import EmbeddedRedis, check_redis, find_binary

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 15.0  # between two attempts to restart it


class RedisService:
    """Starts Redis or checks it, and restarts the embedded one when it dies."""

    def __init__(
        self,
        config: DaemonConfig,
        home: Home,
        remote: RemoteRuns | None,
        on_restart: Callable[[], None],
    ) -> None:
        """`remote`: the bucket for run directories. `on_restart` is called after each restart."""
        self.url = config.redis_url or home.redis_url
        self.embedded: EmbeddedRedis | None = None
        self._config = config
        self._home = home
        self._remote = remote
        self._on_restart = on_restart
        self._failed_restarts = 0  # in a row
        self._restart_at = float("-inf")  # the earliest time of the next attempt, of `clock`

    @property
    def repairs(self) -> list[Repair]:
        """The repairs of the append-only file at the latest start of the embedded Redis."""
        return [] if self.embedded is None else self.embedded.repairs

    @property
    def copies(self) -> list[str]:
        """The folders of the copies of repaired append-only files, unless they were removed."""
        if self.embedded is None:
            return []
        return [repair.copy for repair in aof_repair.reports(self._home.damaged)]

    def start(self, *, was_warm: bool) -> BootProgress:
        """Start or check it; return what `warmd start` prints. Raises WarmdError.

        `was_warm`: an earlier supervisor of this daemon has used it already.
        """
        begun = time.perf_counter()
        if self._config.redis_url is None:
            self.embedded = EmbeddedRedis(self._home, find_binary(self._config.redis_binary))
            try:
                self.embedded.start()
            except OSError as error:
                folder = self._home.redis_folder
                raise Unavailable(f"Redis: cannot use {folder}: {error}") from error
        with keys.connect(self.url) as connection:  # with a timeout for a remote Redis
            check_redis(connection, self._config.redis_url)
            key_prefix.claim(connection)
            if self.embedded is None:
                self._claim_runs(connection, was_warm)
            info: Any = connection.info("memory")
        return BootProgress(
            "server",
            True,
            name="embedded" if self.embedded else "external",
            seconds=time.perf_counter() - begun,
            memory_bytes=info.get("used_memory_rss"),
        )

    def restart_if_dead(self) -> bool:
        """Restart the embedded Redis; return whether it had ended, and runs again.

        The pauses between attempts that fail grow. Raises Unavailable if it fails too often. A
        shortage (full disk, no process) does not count: it waits.
        """
        if self.embedded is None or self.embedded.process is None:
            return False
        code = self.embedded.process.poll()
        if code is None or clock() < self._restart_at:
            return False
        log.error("Redis: ended (%s), restarting it", code)
        try:
            self.embedded.start()
        except (Unavailable, OSError) as error:
            self._failed_restarts += 1
            pause_s = backoff_s(self._failed_restarts - 1, first_s=1.0, longest_s=_LONGEST_PAUSE_S)
            self._restart_at = clock() + pause_s
            full = self._home.full_folder_of_redis()
            waits = full is not None or isinstance(error, aof_repair.NoSpace | Lacking)
            if not waits and self._failed_restarts >= MAX_QUICK_KILLS:
                raise Unavailable(f"Redis cannot be restarted: {error}") from error
            cause = error if full is None else f"the disk of {full} is full"
            log.error("Redis: not restarted: %s; next attempt in %.0f s", cause, pause_s)
            return False
        self._failed_restarts = 0
        self._on_restart()
        return True

    def stop(self) -> None:
        if self.embedded is not None:
            self.embedded.stop()

    def _claim_runs(self, connection: redis.Redis, was_warm: bool) -> None:
        try:
            runs_owner.claim(connection, self._home, self._remote)
        except StoreUnavailable as error:
            if not was_warm:  # otherwise it was usable before, and jobs can wait
                raise
            log.error("supervisor: %s", error)
