"""The gateway's process: `python -m warmd.daemon.gateway HOME PARENT`, its settings on stdin.

It says on stdout, once, where it listens or why it cannot; the supervisor reads it.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI

from ...configs.config import DaemonConfig, check_http
from ...configs.values import ConfigError
from ..leash import end_with_parent
from .app import create_app
from .door import Door, allow_many

_BACKLOG = 512
_GRACE_S = 2  # for those that wait to read that the daemon stops


class _Server(uvicorn.Server):
    """Says when it listens, and ends the waits of requests when it is to end."""

    def __init__(self, app: FastAPI, url: str) -> None:
        settings: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False}
        super().__init__(
            uvicorn.Config(
                app, http=Door, ws="none", timeout_graceful_shutdown=_GRACE_S, **settings
            )
        )
        self._app = app
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _tell({"stage": "http", "url": self._url})

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.gate.stop()
        await super().shutdown(sockets)


def _tell(message: dict[str, Any]) -> None:
    os.write(1, orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE))


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
    request = orjson.loads(sys.stdin.buffer.read())
    config = DaemonConfig.from_json(request["config"])
    allow_many()
    try:
        listener = _listen(config)
    except (OSError, ConfigError) as error:
        _tell({"stage": "http", "problem": f"{config.http_host}:{config.http_port}: {error}"})
        sys.exit(1)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    _Server(create_app(config, request["url"]), f"http://{shown}:{port}").run([listener])


if __name__ == "__main__":
    main()
