"""The main loop's wait: ended by output of child processes, signals and other threads."""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Callable


class Wakeups:
    """A selector whose keys hold the functions that read what has arrived."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def on_signals(self, stop: Callable[[], None]) -> None:
        """Let signals end a wait as well; unblock SIGTERM and SIGINT, which call `stop`."""
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop())
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.selector.register(
            self._receiver, selectors.EVENT_READ, lambda: self._receiver.recv(4096)
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))

    def wake(self) -> None:
        """End the present wait, or the next one; called by any thread."""
        os.write(self._sender.fileno(), b"x")

    def wait(self, timeout_s: float) -> bool:
        """Handle messages that have arrived or arrive within the time; return whether any did."""
        ready = self.selector.select(timeout_s)
        for key, _ in ready:
            key.data()
        return bool(ready)

    def handle_pending(self) -> None:
        """Handle all messages that have arrived, such as those that a child sent before it died."""
        while self.wait(0):
            pass
