"""The supervisor's child processes: starting them, reading their output, counting their deaths."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ...configs.config import WorkerConfig
from ...jobs.files.shortage import of_start
from ..host.home import Home
from ..host.messages import (
    Alive,
    GatewayStatus,
    GatewayUse,
    JobsHeld,
    Malformed,
    Message,
    decode,
    encode,
)

log = logging.getLogger(__name__)

_QUICK_DEATH_S = 5.0  # a process that lived for less died quickly
_MAX_QUICK_FAILURES = 3  # quick deaths in a row before the daemon gives up
MAX_QUICK_KILLS = 10  # the same for deaths by a signal: the next start may succeed
HUNG_S = 10.0  # without a heartbeat; shorter than a worker's lease
_MAX_LINE_BYTES = 1 << 16  # longer lines are split
_MAX_RETRY_S = 60.0  # between two starts of a gateway that keeps dying


class Child:
    """One child process, and how often it died quickly."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0
        self.is_ready = False  # since its latest start
        self.quick_deaths = 0  # in a row
        self.is_refused = False  # the machine could start no process at the latest try
        self._silent_s: float | None = None  # since its latest heartbeat; None before the first

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def start(
        self,
        selector: selectors.BaseSelector,
        module: str,
        home: Home,
        settings: Message,
        *,
        on_message: Callable[[Message], None],
    ) -> None:
        """Start `python -m module`. Only from the main thread, since its end kills the child.

        On a machine that can start no process now, `has_died` is true afterwards.

        `settings` is written to its stdin. `on_message` receives its messages on stdout; its stderr
        goes to the log, line by line. Both are read by callbacks registered with `selector`.
        """
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(home.path), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            if of_start(error) is None:
                raise
            if not self.is_refused:
                log.error("%s: the machine can start no process: %s", self.name, error.strerror)
            self.process, self.is_refused = None, True
            return
        self.is_refused = False
        self.started = time.monotonic()
        self.is_ready = False
        self._silent_s = None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # killed at once: see `has_died`
            self.process.stdin.write(encode(settings))
            self.process.stdin.close()
        _read_lines(selector, self.process.stdout, partial(self._handle_line, on_message))
        _read_lines(
            selector,
            self.process.stderr,
            lambda line: log.info("%s", line.decode("utf-8", "replace")),
        )

    def _handle_line(self, on_message: Callable[[Message], None], line: bytes) -> None:
        """Handle a line of its stdout; lines that a library has printed go to the log."""
        message = decode(line)
        if message is None or isinstance(message, Malformed):
            log.info("%s: %s", self.name, line.decode("utf-8", "replace"))
        elif isinstance(message, Alive):
            self._silent_s = 0.0
        else:
            on_message(message)

    def end_if_hung(self, passed_s: float) -> None:
        """Kill it if its heartbeats have stopped; `has_died` is true afterwards.

        `passed_s`: time since the last call, without time in which this process was suspended.
        """
        if self._silent_s is None or self.process is None:
            return
        self._silent_s += passed_s
        if self._silent_s > HUNG_S:
            log.error("%s: hangs: no heartbeat for %g s, killing it", self.name, HUNG_S)
            self.process.kill()
            self._silent_s = None

    def has_died(self) -> bool:
        if self.process is None:
            return self.is_refused
        return self.process.poll() is not None

    def kill(self) -> None:
        """Kill it and wait until it has ended; does nothing if it was never started."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def cannot_stay_up(self) -> bool:
        """Count a death; return whether the daemon should give up."""
        assert self.process is not None
        lived = time.monotonic() - self.started
        code = self.process.returncode
        # A process that was never ready counts too: it may take long to fail every time. One that
        # was ready and ends with 0 was told to.
        was_quick = (lived < _QUICK_DEATH_S and code != 0) or not self.is_ready
        self.quick_deaths = self.quick_deaths + 1 if was_quick else 0
        killed = code < 0
        return self.quick_deaths >= (MAX_QUICK_KILLS if killed else _MAX_QUICK_FAILURES)


class WorkerChild(Child):
    """A worker process; every start gives it a new name in Redis."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config.name)
        self.config = config
        self.redis_name = ""
        self.held: list[str] = []  # jobs that it reported last
        self.taken = 0  # number of jobs by all its processes
        self.is_closing = False  # it takes no more jobs
        self._taken_now = 0  # number of jobs by the current one

    def start(self, *args: Any, **kwargs: Any) -> None:
        """Start it like any child; its count of jobs begins at 0."""
        self.held, self._taken_now, self.is_closing = [], 0, False
        super().start(*args, **kwargs)

    def note_jobs(self, report: JobsHeld) -> None:
        """Record the jobs that it reported."""
        self.held = report.jobs
        self.taken += report.taken - self._taken_now
        self._taken_now = report.taken

    def close(self) -> None:
        """Let it take no more jobs and end with the last one; does nothing if it has ended."""
        if self.process is not None and self.is_ready and not self.is_closing:
            self.process.send_signal(signal.SIGUSR1)
            self.is_closing = True


class OptionalChild(Child):
    """A process that the daemon runs without, and restarts with growing delays."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._start_at = 0.0

    def must_start(self) -> bool:
        """Return whether it is dead and the delay is over; counts a death."""
        if self.process is not None and self.has_died():
            lived = time.monotonic() - self.started
            code, wait_s = self.process.returncode, 0.0
            if code == 0:  # it has nothing left to do
                self.quick_deaths = 0
            else:
                self.quick_deaths = self.quick_deaths + 1 if lived < _QUICK_DEATH_S else 0
                wait_s = min(2.0**self.quick_deaths - 1, _MAX_RETRY_S)
                log.error("%s: ended (%s), restarting in %g s", self.name, code, wait_s)
            self.process = None
            self._start_at = time.monotonic() + wait_s
        return self.process is None and time.monotonic() >= self._start_at


class GatewayChild(OptionalChild):
    """The HTTP gateway."""

    def __init__(self) -> None:
        super().__init__("http")
        self.url: str | None = None  # while it listens
        self.problem: str | None = None  # why it could not listen
        self.use: GatewayUse | None = None  # the latest

    def handle(self, message: Message) -> None:
        if isinstance(message, GatewayUse):
            self.use = message
        if not isinstance(message, GatewayStatus):
            return
        self.url, self.problem = message.url, message.problem
        log.info("http: %s", self.problem or f"listening on {self.url}")

    def must_start(self) -> bool:
        is_due = super().must_start()
        if self.process is None:
            self.url = self.use = None
        return is_due


def _read_lines(
    selector: selectors.BaseSelector, stream: Any, take: Callable[[bytes], None]
) -> None:
    os.set_blocking(stream.fileno(), False)
    partial_line = b""

    def read() -> None:
        nonlocal partial_line
        data = os.read(stream.fileno(), 1 << 16)
        if not data:
            if partial_line:
                take(partial_line)
            selector.unregister(stream)
            stream.close()
            return
        *lines, partial_line = (partial_line + data).split(b"\n")
        if len(partial_line) > _MAX_LINE_BYTES:
            lines.append(partial_line)
            partial_line = b""
        for line in lines:
            take(line.rstrip(b"\r").rpartition(b"\r")[2])  # the last state of a progress bar

    selector.register(stream, selectors.EVENT_READ, read)
