"""The supervisor's children: starting one, hearing what it says, counting how often it died."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson

from ...configs.config import WorkerConfig
from ..host import heartbeat
from ..host.home import Home

log = logging.getLogger(__name__)

_QUICK_DEATH_S = 5.0
_MOST_QUICK_FAILURES = 3  # in a row, before the daemon gives up
MOST_QUICK_KILLS = 10  # the same for deaths by a signal, which say less about the next try
HUNG_S = 10.0  # without a sign of life; less than what a worker's lease lasts
_LONGEST_LINE = 1 << 16  # bytes; what is longer counts as several
_LONGEST_WAIT_S = 60.0  # between two starts of a gateway that does not stay up


class Child:
    """One process of ours, and how often it died young."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0
        self.is_ready = False  # since its latest start
        self.quick_deaths = 0  # in a row
        self._silent_s: float | None = None  # since its latest sign of life; None before the first

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def start(
        self,
        selector: selectors.BaseSelector,
        module: str,
        home: Home,
        settings: dict[str, Any],
        *,
        tells: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Start a Python process of ours, from the main thread: its leash breaks with the thread.

        `tells` is given its messages on stdout. What it says on stderr goes to the log, line by
        line. `selector` calls whoever reads.
        """
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(home.path), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if tells else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.started = time.monotonic()
        self.is_ready = False
        self._silent_s = None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # killed at once: `has_died` will say so
            self.process.stdin.write(orjson.dumps(settings))
            self.process.stdin.close()
        if tells is not None:
            _read_lines(selector, self.process.stdout, partial(self._heed, tells))
        _read_lines(
            selector,
            self.process.stderr,
            lambda line: log.info("%s", line.decode("utf-8", "replace")),
        )

    def _heed(self, tells: Callable[[dict[str, Any]], None], line: bytes) -> None:
        """Take a line of its stdout; what a library printed there goes to the log."""
        try:
            message = orjson.loads(line)
        except orjson.JSONDecodeError:
            message = None
        if not isinstance(message, dict) or not message.keys() & {"stage", "error"}:
            log.info("%s: %s", self.name, line.decode("utf-8", "replace"))
        elif message.get("stage") == heartbeat.STAGE:
            self._silent_s = 0.0
        else:
            tells(message)

    def end_if_hung(self, passed_s: float) -> None:
        """Kill it when it gave signs of life and gives none any more; then it is one of the dead.

        `passed_s`: the time since the last call in which this process was awake itself.
        """
        if self._silent_s is None or self.process is None:
            return
        self._silent_s += passed_s
        if self._silent_s > HUNG_S:
            log.error("%s: hangs: no sign of life for %g s, killing it", self.name, HUNG_S)
            self.process.kill()
            self._silent_s = None

    def has_died(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def cannot_stay_up(self) -> bool:
        """Count a death; return whether starting it once more makes no sense."""
        assert self.process is not None
        lived = time.monotonic() - self.started
        # One that was never ready may have taken long for it, and would do so every time.
        was_quick = lived < _QUICK_DEATH_S or not self.is_ready
        self.quick_deaths = self.quick_deaths + 1 if was_quick else 0
        killed = self.process.returncode < 0
        return self.quick_deaths >= (MOST_QUICK_KILLS if killed else _MOST_QUICK_FAILURES)


class WorkerChild(Child):
    """A worker process; each incarnation has a name of its own in Redis."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config.name)
        self.config = config
        self.redis_name = ""


class GatewayChild(Child):
    """The HTTP gateway. The daemon lives on without it, and tries again, ever less often."""

    def __init__(self) -> None:
        super().__init__("http")
        self.url: str | None = None  # once it listens
        self.problem: str | None = None  # why it could not, the last time
        self._again_at = 0.0

    def hear(self, message: dict[str, Any]) -> None:
        self.url, self.problem = message.get("url"), message.get("problem")
        log.info("http: %s", self.problem or f"listening on {self.url}")

    def must_start(self) -> bool:
        """Whether it is dead and it is time to start it; counts a death."""
        if self.process is not None and self.has_died():
            lived = time.monotonic() - self.started
            self.quick_deaths = self.quick_deaths + 1 if lived < _QUICK_DEATH_S else 0
            wait_s = min(2.0**self.quick_deaths - 1, _LONGEST_WAIT_S)
            log.error("http: ended (%s), next try in %g s", self.process.returncode, wait_s)
            self.process, self.url = None, None
            self._again_at = time.monotonic() + wait_s
        return self.process is None and time.monotonic() >= self._again_at


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
        if len(partial_line) > _LONGEST_LINE:
            lines.append(partial_line)
            partial_line = b""
        for line in lines:
            take(line.rstrip(b"\r").rpartition(b"\r")[2])  # a progress bar's latest

    selector.register(stream, selectors.EVENT_READ, read)
