"""The parent's end of a process that answers requests, one at a time, as JSON lines on a socket.

JSON, never a pickle: the process runs code that others wrote. Its output is not mixed with its
answers, and it ends with its parent, whose end of the socket is then closed. `child_server` is its
end.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .child_server import encoded

_END_S = 5.0  # for a process to end by itself once nothing is requested anymore


class Child:
    """A process behind a socket, however it was started."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def ask(self, request: Mapping[str, Any], limit_s: float | None = None) -> dict[str, Any]:
        """Return the answer to a request; `limit_s`: of waiting, None: no limit.

        Raises TimeoutError after the limit, and EOFError if the process ends.
        """
        self.send(request, limit_s)
        return self.receive(limit_s)

    def send(self, request: Mapping[str, Any], limit_s: float | None = None) -> None:
        """Send a request, whose answer `receive` returns. Raises TimeoutError."""
        self._connection.settimeout(limit_s)
        with suppress(ConnectionError):  # it has ended: `receive` says so
            self._connection.sendall(encoded(request))

    def receive(self, limit_s: float | None = None) -> dict[str, Any]:
        """Return the next answer. Raises TimeoutError and EOFError."""
        until = None if limit_s is None else time.monotonic() + limit_s
        line = bytearray()
        while not line.endswith(b"\n"):
            left_s = None if until is None else max(until - time.monotonic(), 1e-3)
            self._connection.settimeout(left_s)
            try:
                part = self._connection.recv(1 << 16)
            except ConnectionError:
                part = b""
            if not part:
                raise self._ended()
            line += part
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Close the connection: the process ends once it has answered."""
        self._connection.close()

    def _ended(self) -> Exception:
        return EOFError("it has ended")


class SpawnedChild(Child):
    """A new process that runs a module, which calls `child_server.serve(…, parent())`.

    `shows_output`: its stdout and stderr are the stderr of this process. Raises OSError if it
    cannot be started.
    """

    def __init__(self, module: str, *, shows_output: bool = True) -> None:
        connection, theirs = socket.socketpair()
        super().__init__(connection)
        number = theirs.fileno()
        output = 2 if shows_output else subprocess.DEVNULL
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(number)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[number],
                )
        except OSError:
            connection.close()
            raise

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Let the process end by itself; kill it if it does not."""
        super().close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process at once, and wait for its end."""
        super().close()
        self._process.kill()
        self._process.wait()

    def _ended(self) -> Exception:
        code = self._process.wait()
        return TimeoutError() if code == -signal.SIGPROF else EOFError(f"exit code {code}")
