"""A unix socket that carries messages, one JSON object per line.

A peer that dies in the middle of a line leaves a fragment that is not JSON; it is skipped.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from ...jobs.errors import WarmdError
from .messages import Message, decode, encode

_CHUNK = 1 << 16
_MAX_MESSAGE_BYTES = 1 << 24  # a longer one closes the connection
_ENVELOPE_BYTES = 1 << 12  # of a message, besides the result that it carries


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

    def send(self, *messages: Message) -> None:
        """Send all messages, blocking as the socket's timeout says. Raises OSError."""
        self.sock.sendall(b"".join(map(encode, messages)))

    def send_nowait(self, message: Message) -> None:
        """Send without blocking; the message is lost if the peer is dead or its buffer is full.

        Starts with a newline: it ends the line that another sender on this socket may have died
        in.
        """
        with contextlib.suppress(OSError):
            self.sock.send(b"\n" + encode(message), socket.MSG_DONTWAIT)

    def receive(self) -> list[Message]:
        """Read once, blocking as the socket's timeout says; return the complete messages.

        At the end of the stream `closed_by_peer` is set.
        """
        try:
            data = self.sock.recv(_CHUNK)
        except ConnectionError:
            data = b""
        if not data:
            self.closed_by_peer = True
            return []
        self._partial += data
        if len(self._partial) > _MAX_MESSAGE_BYTES:
            self.closed_by_peer = True
        if b"\n" not in data:
            return []
        *lines, self._partial = self._partial.split(b"\n")
        return [message for line in lines if (message := decode(line)) is not None]

    def __iter__(self) -> Iterator[Message]:
        """Yield messages until the peer closes."""
        while not self.closed_by_peer:
            yield from self.receive()


def check_size(result: Any) -> None:
    """Raise WarmdError if a job's result is too long for a message."""
    excess = len(orjson.dumps(result, default=str)) + _ENVELOPE_BYTES - _MAX_MESSAGE_BYTES
    if excess > 0:
        raise WarmdError(
            f"result: must be at most {_MAX_MESSAGE_BYTES - _ENVELOPE_BYTES} bytes as JSON, got "
            f"{excess} more: write large data into a file of the run directory"
        )


def listen(path: Path) -> socket.socket:
    """Listen on a unix socket that only its owner can use; replaces the file of a dead process."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    path.chmod(0o600)
    sock.listen(64)
    return sock
