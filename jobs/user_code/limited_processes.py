"""Processes with limits on time and memory, for programs that others wrote.

A chat template, a JSON Schema or the rules of a tokenizer can take all memory, or hours, within one
call of a library, and a thread cannot be interrupted in it. A process can be ended. It is kept for
the next requests, so that each costs a fraction of a millisecond. `limited_server` is its other
end: requests on stdin, answers on stdout, as JSON lines.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from select import select
from typing import Any

from ..errors import Unavailable
from ..files.shortage import Lacking, of_start

_START_S = 30.0  # for the process to start, on a busy machine
_MOST_PROCESSES = 4  # that work at the same time


class LimitedProcesses:
    """The processes of one module in this process: one per concurrent request, and an idle one."""

    def __init__(self, module: str, *, shows_errors: bool = True) -> None:
        """`module`: calls limited_server.serve. `shows_errors`: on the stderr of this process."""
        self._module = module
        self._shows_errors = shows_errors
        self._reset()
        _every.append(self)
        os.register_at_fork(after_in_child=self._reset)  # the pipes are the parent's

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(_MOST_PROCESSES)
        self._waiting: list[_Process] = []

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
            return process.answer({**request, **limits}, limit_s)

    @contextmanager
    def _one(self) -> Iterator[_Process]:
        """Yield a process for one request. It is ended if the block raises."""
        with self._free:
            process = self._taken()
            try:
                yield process
            except BaseException:
                process.end()
                raise
            with self._lock:
                if not self._waiting and process.is_usable:
                    self._waiting.append(process)
                    return
            process.end()

    def _taken(self) -> _Process:
        with self._lock:
            while self._waiting:
                process = self._waiting.pop()
                if process.is_usable:
                    return process
                process.end()
        return self._started()

    def _started(self) -> _Process:
        """Return a new process that is ready. Raises Lacking, Unavailable."""
        try:
            process = _Process(self._module, shows_errors=self._shows_errors)
        except OSError as error:
            if (lacking := of_start(error)) is None:
                raise
            raise Lacking(lacking) from error
        try:
            process.wait_until_ready()
        except (TimeoutError, EOFError) as error:
            process.end()
            raise Unavailable(f"the process of {self._module} does not start: {error}") from error
        return process

    def end_idle(self) -> None:
        """End the idle processes."""
        with self._lock:
            while self._waiting:
                self._waiting.pop().end()


_every: list[LimitedProcesses] = []


def end_idle() -> None:
    """End the idle processes of all modules."""
    for processes in _every:
        processes.end_idle()


atexit.register(end_idle)


class _Process:
    """A process that answers one request at a time."""

    def __init__(self, module: str, *, shows_errors: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if shows_errors else subprocess.DEVNULL,
            encoding="ascii",
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._is_last = False

    @property
    def is_usable(self) -> bool:
        return not self._is_last and self._process.poll() is None

    def answer(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Raises TimeoutError after the limit, EOFError where the process ends."""
        with suppress(BrokenPipeError):  # it has ended: the end of its output shows it
            self._input.write(json.dumps(request) + "\n")
            self._input.flush()
        answer = self._line(limit_s)
        self._is_last = answer.pop("is_last")
        return answer

    def wait_until_ready(self) -> None:
        """Raises TimeoutError and EOFError."""
        self._line(_START_S)

    def _line(self, limit_s: float) -> dict[str, Any]:
        if not select([self._output], [], [], limit_s)[0]:
            raise TimeoutError
        line = self._output.readline()
        if not line.endswith("\n"):
            code = self._process.wait()
            raise TimeoutError if code == -signal.SIGPROF else EOFError(f"exit code {code}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        self._process.kill()
        with suppress(BrokenPipeError), self._process:  # closes the pipes and waits
            pass
