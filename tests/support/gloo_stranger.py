"""A program that connects to ranks as if it were another rank, and sends them pickles.

It knows gloo's protocol and where the ranks listen, but not the secret of their job.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Self

_HEADER = struct.Struct("<6Q")  # size, operation, slot, offset, length, offset there
_SEND, _READY_TO_SEND, _READY_TO_RECEIVE = 1, 2, 3
_GUESSES = 4  # sequence numbers of gloo's connections, of which one is expected


class _Runs:
    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


class GlooStranger:
    """Connects to ports of 127.0.0.1 and answers there. A context manager, which ends it."""

    def __init__(self, command: str | None, ports: Iterable[int]) -> None:
        """`command` is run by whoever loads a pickle of this program; None: it answers nothing."""
        self.num_messages = 0  # that it has received
        self._content = None if command is None else pickle.dumps(_Runs(command))
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self._connections: dict[socket.socket, bytes] = {}  # with what is not answered yet
        for port in ports:
            for number in range(_GUESSES):
                connection = socket.create_connection(("127.0.0.1", port))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(struct.pack("<q", number))
                self._connections[connection] = b""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()
        for connection in self._connections:
            connection.close()

    def _answer(self) -> None:
        while not self._has_ended.is_set():
            for connection in select.select(list(self._connections), [], [], 0.05)[0]:
                received = b""
                with suppress(OSError):  # the rank has ended
                    received = connection.recv(1 << 16)
                    rest = self._connections[connection] + received
                    self._connections[connection] = self._handle(connection, rest)
                if not received:
                    del self._connections[connection]
                    connection.close()

    def _handle(self, connection: socket.socket, received: bytes) -> bytes:
        """Answer all complete messages; return the rest."""
        while len(received) >= _HEADER.size:
            _, operation, slot, _, length, _ = _HEADER.unpack_from(received)
            end = _HEADER.size + (length if operation <= _SEND else 0)
            if len(received) < end:
                break
            received = received[end:]
            self.num_messages += 1
            if self._content is None:
                continue
            if operation == _READY_TO_RECEIVE:
                content = (self._content * (length // len(self._content) + 1))[:length]
                header = (_HEADER.size + length, _SEND, slot, 0, length, 0)
                connection.sendall(_HEADER.pack(*header) + content)
            elif operation == _READY_TO_SEND:
                header = (_HEADER.size, _READY_TO_RECEIVE, slot, 0, length, 0)
                connection.sendall(_HEADER.pack(*header))
        return received
