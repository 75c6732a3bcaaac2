"""Processes with limits on time and memory, for programs that others wrote.

A chat template, a JSON Schema or the rules of a tokenizer can take all memory, or hours, within one
call of a library, and a thread cannot be interrupted in it. A process can be ended. It is kept for
the next requests, so that each costs a fraction of a millisecond.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import Unavailable
from ..files.shortage import Lacking, of_start
from .child import SpawnedChild

_START_S = 30.0  # for the process to start, on a busy machine
_MOST_PROCESSES = 4  # that work at the same time


class _Limited(SpawnedChild):
    is_last = False  # whether it has answered its last request

    @property
    def is_usable(self) -> bool:
        return not self.is_last and self.is_running


class LimitedProcesses:
    """The processes of one module in this process: one per concurrent request, and an idle one."""

    def __init__(self, module: str, *, shows_output: bool = True) -> None:
        """`module`: calls serve_within_limits. `shows_output`: on the stderr of this process."""
        self._module = module
        self._shows_output = shows_output
        self._reset()
        _every.append(self)
        os.register_at_fork(after_in_child=self._reset)  # the pipes are the parent's

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(_MOST_PROCESSES)
        self._waiting: list[_Limited] = []

    def answer(
        self, request: dict[str, Any], limit_s: float, *, processor_s: float | None = None
    ) -> dict[str, Any]:
        """Return the answer to a request.

        `limit_s`: of waiting. `processor_s`: of work, which a busy machine does not use up.

        Raises TimeoutError after a limit, EOFError if the process ends, as without memory; Lacking
        and Unavailable if no process can be started.
        """
        limits = {"limit_s": limit_s + 1, "processor_s": processor_s or 0}
        with self._one() as process:
            answer = process.ask({**request, **limits}, limit_s)
            process.is_last = answer.pop("is_last")
            return answer

    @contextmanager
    def _one(self) -> Iterator[_Limited]:
        """Yield a process for one request. It is ended if the block raises."""
        with self._free:
            process = self._taken()
            try:
                yield process
            except BaseException:
                process.kill()
                raise
            with self._lock:
                if not self._waiting and process.is_usable:
                    self._waiting.append(process)
                    return
            process.kill()

    def _taken(self) -> _Limited:
        with self._lock:
            while self._waiting:
                process = self._waiting.pop()
                if process.is_usable:
                    return process
                process.kill()
        return self._started()

    def _started(self) -> _Limited:
        """Return a new process that is ready. Raises Lacking, Unavailable."""
        try:
            process = _Limited(self._module, shows_output=self._shows_output)
        except OSError as error:
            if (lacking := of_start(error)) is None:
                raise
            raise Lacking(lacking) from error
        try:
            process.receive(_START_S)
        except (TimeoutError, EOFError) as error:
            process.kill()
            raise Unavailable(f"the process of {self._module} does not start: {error}") from error
        return process

    def end_idle(self) -> None:
        """End the idle processes."""
        with self._lock:
            while self._waiting:
                self._waiting.pop().kill()


_every: list[LimitedProcesses] = []


def end_idle() -> None:
    """End the idle processes of all modules."""
    for processes in _every:
        processes.end_idle()


atexit.register(end_idle)
