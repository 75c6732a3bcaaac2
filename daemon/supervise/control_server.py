"""The supervisor's control socket: one JSON request a connection, one reply.

Each connection has a thread of its own, so that a model that takes long to load delays no other
request. These threads start no process that ends with its parent: it would end with the thread.
"""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from ...jobs.errors import WarmdError
from ..host.channel import Channel

Answer = Callable[[dict[str, Any]], dict[str, Any]]  # of a request; raises WarmdError


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 64
    answer: Answer


class _Handler(socketserver.StreamRequestHandler):
    server: _Server
    timeout = 5.0  # for the request to come: whoever is silent must not keep a thread

    def handle(self) -> None:
        channel = Channel(self.request)
        try:
            request = next(iter(channel), None)
        except TimeoutError:
            return
        if request is None:
            return
        try:
            reply = self.server.answer(request)
        except WarmdError as error:
            reply = {"error": str(error), "exit_code": error.exit_code}
        except redis.RedisError as error:
            reply = {"error": f"the server does not answer: {error}", "exit_code": 3}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            reply = {"error": f"not a request: {error!r}", "exit_code": 2}
        channel.send_if_heard(reply)


class ControlServer:
    """Listens until closed."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self._path = path
        self._path.unlink(missing_ok=True)
        self._server = _Server(str(self._path), _Handler)
        self._server.answer = answer
        self._path.chmod(0o600)
        threading.Thread(target=self._server.serve_forever, name="control", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._path.unlink(missing_ok=True)
