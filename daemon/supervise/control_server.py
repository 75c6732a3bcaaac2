"""The supervisor's control socket: one request per connection, one reply.

Each connection has its own thread, so that loading a large model delays no other request. These
threads must not start processes that end with their parent: they would end with the thread.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from ...jobs.errors import Unavailable, WarmdError
from ...jobs.files.shortage import Shortage
from ..host.channel import Channel
from ..host.messages import Failure, Malformed, Message
from ..host.open_files import Acceptor

Handle = Callable[[Message], Message]  # returns the reply; raises WarmdError


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 64
    handle_request_message: Handle

    def server_activate(self) -> None:
        super().server_activate()
        self._acceptor = Acceptor(self.socket)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Return a new connection. Raises OSError after one that was served at once."""
        connection = self._acceptor.accept(self._serve_now)
        if connection is None:
            raise OSError("served")  # which the caller ignores
        return connection, ""

    def _serve_now(self, connection: socket.socket, lacking: Shortage) -> None:
        """Serve a connection without a thread, before the next one."""
        _Handler(connection, "", self)

    def server_close(self) -> None:
        super().server_close()
        self._acceptor.close()


class _Handler(socketserver.StreamRequestHandler):
    server: _Server
    timeout = 5.0  # for the request to arrive: a silent caller must not keep a thread

    def handle(self) -> None:
        channel = Channel(self.request)
        try:
            request = next(iter(channel), None)
        except TimeoutError:
            return
        if request is None:
            return
        channel.send_nowait(self._reply(request))

    def _reply(self, request: Message) -> Message:
        try:
            if isinstance(request, Malformed):
                raise ValueError(request.problem)
            return self.server.handle_request_message(request)
        except WarmdError as error:
            return Failure.of(error)
        except redis.RedisError as error:
            return Failure(f"Redis does not reply: {error}", 3)
        except OSError as error:
            return Failure.of(Unavailable(str(error)))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            return Failure(f"not a request: {error!r}", 2)


class ControlServer:
    """Listens on the control socket until closed."""

    def __init__(self, path: Path, handle: Handle) -> None:
        self._path = path
        self._path.unlink(missing_ok=True)
        self._server = _Server(str(self._path), _Handler)
        self._server.handle_request_message = handle
        self._path.chmod(0o600)
        threading.Thread(target=self._server.serve_forever, name="control", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._path.unlink(missing_ok=True)
