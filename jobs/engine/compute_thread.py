"""Compute thread: all engines of a process share it, evenly by the time of their steps.

OpenMP creates a pool of worker threads for each thread that computes. With more of them than
processors they all sleep between two operations instead of spinning: a 0.5B model in int8 decoded
30 tokens/s with two computing threads, 54 with one. So one thread computes, and request preparation
runs concurrently without a pool (`without_helpers`). Only the preparation of an engine has a pool,
while it lasts. Imports torch.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

import torch

from ..compute.threads import compute_with


class Steppable(Protocol):
    """An engine. Its properties are read under the lock of `ComputeThread.changed`."""

    threads: int  # OpenMP threads that it computes with

    @property
    def is_ready(self) -> bool:
        """Whether a step would make progress: the model is prepared and there are requests."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""

    @property
    def is_decoding(self) -> bool:
        """Whether a sequence is decoding."""

    @property
    def has_idle_work(self) -> bool:
        """Whether there is work for steps without requests, such as packing weights."""

    def step(self) -> None:
        """Compute one scheduler step. Raises nothing."""


class ComputeThread:
    """Runs the steps of all engines that are ready, evenly by time. Idle work comes last.

    Start-time fair queueing (Goyal et al., SIGCOMM 1996): an engine whose steps are long takes
    fewer of them, and one that was idle has saved up nothing.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()  # notified when an engine has new work
        self._engines: list[Steppable] = []
        self._current: Steppable | None = None  # the engine that is taking a step
        self._thread: threading.Thread | None = None  # None: no engines
        self._begun = 0.0  # virtual time: start of the latest step
        self._ended: dict[Steppable, float] = {}  # virtual time: end of each engine's latest step

    def add(self, engine: Steppable) -> None:
        """Add an engine; the first one starts the thread."""
        with self.changed:
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name="engines", daemon=True)
                thread.start()
                self._thread = thread
            self._engines.append(engine)

    def remove(self, engine: Steppable) -> None:
        """Remove an engine once it is idle; the thread ends with the last one."""
        with self.changed:
            thread = self._thread
            self.changed.wait_for(lambda: engine is not self._current and engine.is_idle)
            if engine in self._engines:  # another thread may have removed it
                self._engines.remove(engine)
                self._ended.pop(engine, None)
            is_last = not self._engines
            if is_last:
                self._thread = None
            self.changed.notify_all()
        if is_last and thread is not None:
            thread.join()  # the process would be aborted if it exited before the thread has ended

    def is_any_decoding(self) -> bool:
        """Whether a sequence of any engine is decoding."""
        with self.changed:
            return any(engine.is_decoding for engine in self._engines)

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
                begun = time.perf_counter()
                engine.step()
                self._ended[engine] = self._begun + time.perf_counter() - begun
                del engine  # a closed engine must not stay referenced until the next step

    def _next(self) -> Steppable | None:
        """Wait for an engine that has work; None when this thread is to end."""
        with self.changed:
            if self._thread is threading.current_thread():
                self._current = None
                self.changed.notify_all()  # the engine may be idle after its step
            while self._thread is threading.current_thread():
                ready = [engine for engine in self._engines if engine.is_ready]
                with_idle_work = (engine for engine in self._engines if engine.has_idle_work)
                engine = min(ready, key=self._start, default=None) or next(with_idle_work, None)
                if engine is not None:
                    self._begun = self._start(engine)
                    self._engines.remove(engine)
                    self._engines.append(engine)  # round robin
                    self._current = engine
                    return engine
                self.changed.wait()
            return None

    def _start(self, engine: Steppable) -> float:
        """Return the virtual time at which an engine's next step begins."""
        return max(self._begun, self._ended.get(engine, 0.0))


COMPUTE_THREAD = ComputeThread()  # of this process
