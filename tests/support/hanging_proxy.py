"""A TCP proxy that can hang (connections stay open without any data) or close all connections."""

from __future__ import annotations

import contextlib
import socket
import threading


class HangingProxy:
    """Forwards connections to a port of this machine."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._flows = threading.Event()
        self._flows.set()
        self._is_cut = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self._sockets: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def hang(self) -> None:
        self._flows.clear()

    def resume(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        """End all connections, and every new one at once."""
        self._is_cut = True
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def restore(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self._flows.set()
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                if self._is_cut:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._target_port))
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
