"""One JSON object a line over a unix socket: how warmd's processes talk to each other.

A peer that dies in the middle of a line leaves a piece that is no JSON; it is skipped.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from ...jobs.errors import WarmdError

_CHUNK = 1 << 16
_LONGEST = 1 << 24  # bytes of one message; whoever sends more is no process of ours
_ENVELOPE = 1 << 12  # bytes of a message besides the result that it carries


class Channel:
    """A connected socket that carries messages."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.closed_by_peer = False
        self._partial = bytearray()

    @classmethod
    def connect(cls, path: Path, *, timeout_s: float | None = None) -> Channel:
        """Connect to a listening process. Raises OSError when there is none."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(str(path))
        except OSError:
            sock.close()
            raise
        return cls(sock)

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    def send(self, *messages: dict[str, Any]) -> None:
        """Send messages whole. Raises OSError when the peer is gone."""
        self.sock.sendall(b"".join(orjson.dumps(message) + b"\n" for message in messages))

    def send_if_heard(self, message: dict[str, Any]) -> None:
        """Send to a peer that may be dead or stuck, without ever waiting for it.

        Begins with a line break: what the peer's partner was writing when it died ends there.
        """
        with contextlib.suppress(OSError):
            self.sock.send(b"\n" + orjson.dumps(message) + b"\n", socket.MSG_DONTWAIT)

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that one read completes; waits for it as the socket's timeout says.

        Sets `closed_by_peer` at the end.
        """
        try:
            data = self.sock.recv(_CHUNK)
        except ConnectionError:
            data = b""
        if not data:
            self.closed_by_peer = True
            return []
        self._partial += data
        if len(self._partial) > _LONGEST:
            self.closed_by_peer = True
        if b"\n" not in data:
            return []
        *lines, self._partial = self._partial.split(b"\n")
        messages = []
        for line in lines:
            with contextlib.suppress(orjson.JSONDecodeError):
                messages.append(orjson.loads(line))
        return [message for message in messages if isinstance(message, dict)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield messages until the peer closes."""
        while not self.closed_by_peer:
            yield from self.receive()


def check_size(result: Any) -> None:
    """Raise WarmdError for a job's result that is too long for a message."""
    excess = len(orjson.dumps(result, default=str)) + _ENVELOPE - _LONGEST
    if excess > 0:
        raise WarmdError(
            f"result: must be at most {_LONGEST - _ENVELOPE} bytes as JSON, got {excess} more: "
            "write what is long into a file of the run directory"
        )


def listen(path: Path) -> socket.socket:
    """Listen on a unix socket that only its owner can use, taking the place of a dead one's."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    path.chmod(0o600)
    sock.listen(64)
    return sock
