"""The gateway's process: `python -m warmd.daemon.gateway HOME PARENT`, its settings on stdin.

It writes one JSON line to stdout for the supervisor: the URL, or why it cannot listen.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from ...configs.config import DaemonConfig, check_http
from ...configs.values import ConfigError, is_loopback
from ...jobs.environments.agent_keys import URL_FILE
from ...jobs.files.atomic import write_atomic
from ..host.heartbeat import Heartbeat
from ..host.messages import GatewaySettings, GatewayStatus, GatewayUse, Message, decode, encode
from ..host.parent_death import end_with_parent
from .app import create_app
from .core.state import AppState
from .http.connection import LimitedConnection

log = logging.getLogger(__name__)

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of malloc.h
_LARGE = 128 * 1024  # bytes: more than one read from a connection
_ARENAS = 2
_RETURN_S = 0.5  # between two returns of freed memory
_COLLECT_S = 10.0  # between two collections of closed connections, which are cycles
_SWITCH_S = 0.001  # how long the parser thread may hold the GIL while the event loop wants it
_BACKLOG = 4096  # connections that wait in the kernel; it drops further ones for a second
_MAX_ACCEPTED = 64  # of them per event loop iteration: more delay open ones, fewer delay new ones
_TICKS_OF_USE = 10  # of 0.1 s, between two reports of who uses the gateway
_MOST_SHOWN = 20  # names in such a report, and
_LONGEST = 500  # characters of a problem: a line of at most 4096 bytes is written as a whole
_GRACE_S = 2  # for waiting clients to receive the 503


class _Server(uvicorn.Server):
    """uvicorn with a heartbeat, a report when it listens, and a shutdown that ends all waits."""

    def __init__(self, app: FastAPI, url: str, *, reports_use: bool) -> None:
        settings: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False}
        super().__init__(
            uvicorn.Config(
                app,
                http=LimitedConnection,
                ws="none",
                proxy_headers=False,  # any program on this machine can send X-Forwarded-*
                timeout_graceful_shutdown=_GRACE_S,
                backlog=_MAX_ACCEPTED,  # asyncio accepts as many at a time as may wait
                **settings,
            )
        )
        self._app = app
        self._url = url
        self._heartbeat = Heartbeat()
        self._reports_use = reports_use
        self._use: GatewayUse | None = None  # the latest that was reported
        self._memory = FreedMemory()
        self._building: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)
        # An address that stands for all is none to connect to.
        url = self._url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        write_atomic(self._url_file, url.encode())
        self._memory.begin()
        _report(GatewayStatus(url=self._url))
        self._building = asyncio.create_task(self._build_routes())

    async def _build_routes(self) -> None:
        """Let FastAPI build its routes, as it does when they are first matched, between requests.

        Together that takes 0.5 s, in which nothing else would be answered.
        """
        nowhere = {"type": "http", "method": "GET", "path": "", "root_path": "", "headers": []}
        for route in self._app.router.routes:
            route.matches(nowhere)
            await asyncio.sleep(0)

    @property
    def _url_file(self) -> Path:
        """For jobs whose agents talk to this gateway."""
        sockets: Path = self._app.state.warmd.client.home.sockets
        return sockets / URL_FILE

    async def on_tick(self, counter: int) -> bool:
        self._heartbeat.send_if_due()
        if self._reports_use and counter % _TICKS_OF_USE == 0:
            self._report_use()
        self._memory.return_if_due()
        return await super().on_tick(counter)

    def _report_use(self) -> None:
        state: AppState = self._app.state.warmd
        numbers = state.requests.numbers()
        most = sorted(numbers, key=lambda name: numbers[name], reverse=True)[:_MOST_SHOWN]
        use = GatewayUse(
            named=len(state.tokens.names),
            problem=None if state.tokens.problem is None else state.tokens.problem[:_LONGEST],
            requests={name: numbers[name][0] for name in most},
            streams={name: numbers[name][1] for name in most},
        )
        if use != self._use:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # as for the heartbeat
                _report(use)
                self._use = use

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._building is not None:
            self._building.cancel()
        self._app.state.warmd.stop()
        self._url_file.unlink(missing_ok=True)
        await super().shutdown(sockets)


def _report(message: Message) -> None:
    os.write(1, encode(message))


class FreedMemory:
    """Returns memory to the system soon after thousands of connections have closed.

    With another C library than glibc, that library decides when.
    """

    def __init__(self) -> None:
        self._trim: Callable[[int], Any] = lambda _: None
        self._returned_at = self._collected_at = time.monotonic()
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)  # large bodies are returned when freed
            libc.mallopt(_M_ARENA_MAX, _ARENAS)
            self._trim = libc.malloc_trim

    def begin(self) -> None:
        """Exclude what exists now, which stays, from garbage collection: it takes 1 ms then."""
        gc.collect()
        gc.freeze()

    def return_if_due(self) -> None:
        """Return the free pages of the heap; less often, free closed connections before.

        With 10 s between two returns, the peak under hundreds of large bodies is 20 MB higher.
        """
        now = time.monotonic()
        if now - self._collected_at >= _COLLECT_S:
            gc.collect()
            self._collected_at = now
        if now - self._returned_at >= _RETURN_S:
            self._trim(0)
            self._returned_at = now


def _listen(config: DaemonConfig) -> socket.socket:
    """Bind the configured address. Raises OSError, or ConfigError where a token must be set."""
    check_http(config)
    assert config.http_port is not None
    family = socket.AF_INET6 if ":" in config.http_host else socket.AF_INET
    address = (config.http_host, config.http_port)
    return socket.create_server(address, family=family, backlog=_BACKLOG)


def main() -> None:
    """Listen until SIGTERM, or until the supervisor is gone."""
    end_with_parent(int(sys.argv[2]))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    settings = decode(sys.stdin.buffer.read())
    assert isinstance(settings, GatewaySettings)
    config = settings.daemon_config()
    sys.setswitchinterval(_SWITCH_S)
    try:
        listener = _listen(config)
    except (OSError, ConfigError) as error:
        _report(GatewayStatus(problem=f"{config.http_host}:{config.http_port}: {error}"))
        sys.exit(1)
    if not is_loopback(config.http_host):
        log.warning(
            "http: %s: token, prompts and answers are sent unencrypted: let only a TLS proxy, or "
            "machines in a network that you trust, reach it",
            config.http_host,
        )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    reports_use = config.http_tokens is not None
    app = create_app(config, settings.url)
    _Server(app, f"http://{shown}:{port}", reports_use=reports_use).run([listener])


if __name__ == "__main__":
    main()
