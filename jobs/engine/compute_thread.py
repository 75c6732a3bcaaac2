"""The thread in which all engines of a process compute, turn by turn.

OpenMP gives every thread that computes helpers of its own, and as soon as there are more of them
than processors they all sleep between two operations instead of being ready for the next: with two
such threads a 0.5B model in int8 wrote 30 tokens per second, with one 54. So there is one, and
what prepares requests beside it computes without helpers (`without_helpers`); only who prepares an
engine has some, for that while. Imports torch.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from ..compute.threads import compute_with


class Turned(Protocol):
    """An engine. Its properties are asked under the lock of `Turns.changed`."""

    threads: int  # that it computes with

    @property
    def is_ready(self) -> bool:
        """Whether it has something to do and can."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left that it was asked for."""

    @property
    def is_writing(self) -> bool:
        """Whether somebody waits for the next token."""

    @property
    def is_unsettled(self) -> bool:
        """Whether there is something that it would do while nobody asks for anything."""

    def turn(self) -> None:
        """Compute for a moment. Raises nothing."""


class Turns:
    """Gives each engine that has something to do its turn, one after the other."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # to be notified of what an engine is to do
        self._engines: list[Turned] = []
        self._current: Turned | None = None  # the one whose turn it is
        self._thread: threading.Thread | None = None  # as long as engines take part

    def join(self, engine: Turned) -> None:
        """Let an engine take part."""
        with self.changed:
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name="engines", daemon=True)
                thread.start()
                self._thread = thread
            self._engines.append(engine)

    def leave(self, engine: Turned) -> None:
        """Let an engine go as soon as it is idle; with the last one the thread ends."""
        with self.changed:
            thread = self._thread
            self.changed.wait_for(lambda: engine is not self._current and engine.is_idle)
            if engine in self._engines:  # somebody else may have let it go
                self._engines.remove(engine)
            is_last = not self._engines
            if is_last:
                self._thread = None
            self.changed.notify_all()
        if is_last and thread is not None:
            thread.join()  # a process that ends while it still ends would be aborted

    def is_anyone_writing(self) -> bool:
        """Whether somebody waits for the next token, of whatever engine."""
        with self.changed:
            return any(engine.is_writing for engine in self._engines)

    def _serve(self) -> None:
        threads = 0
        with torch.inference_mode():
            while True:
                engine = self._next()
                if engine is None:
                    return
                if engine.threads != threads:
                    threads = engine.threads
                    compute_with(threads)
                engine.turn()
                del engine  # or it would be kept, closed as it may be, until the next turn

    def _next(self) -> Turned | None:
        """Wait for an engine that has something to do; None when this thread is to end."""
        with self.changed:
            if self._thread is threading.current_thread():
                self._current = None
                self.changed.notify_all()  # who had its turn may be idle now
            while self._thread is threading.current_thread():
                ready = (engine for engine in self._engines if engine.is_ready)
                unsettled = (engine for engine in self._engines if engine.is_unsettled)
                engine = next(ready, None) or next(unsettled, None)
                if engine is not None:
                    self._engines.remove(engine)
                    self._engines.append(engine)  # behind the others
                    self._current = engine
                    return engine
                self.changed.wait()
            return None


TURNS = Turns()
