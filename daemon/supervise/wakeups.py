"""The main loop's wait: ended by output of child processes, signals and other threads."""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Callable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)  # to guardian or supervisor


def ignore_signals() -> None:
    """Ignore SIGHUP, as a daemon outlives its terminal, and signals that have no meaning here."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # also in the programs that it starts
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, lambda *_: None)


class Wakeups:
    """A selector whose keys hold the functions that read what has arrived."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def on_signals(self, stop: Callable[[], None]) -> None:
        """Let signals end a wait as well; unblock those of `STOP_SIGNALS`, which call `stop`."""
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: stop())
        ignore_signals()
        self.selector.register(
            self._receiver, selectors.EVENT_READ, lambda: self._receiver.recv(4096)
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

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
