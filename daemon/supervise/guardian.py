"""The guardian: the supervisor's parent, small enough never to fail, that starts it again.

It exists so that a kill -9 of the supervisor is repaired within a second, too. Everything below
the supervisor ends with it; the next one finds the queue as it was and the jobs go on.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ...configs.config import DaemonConfig
from ...jobs.errors import WarmdError
from ..host.descendants import adopt_orphans, end_descendants
from ..host.home import Home, private
from .shared_flags import Life

_CRASHED = 70  # the supervisor's exit code for a fault of its own (sysexits' EX_SOFTWARE)
_MOST_RESTARTS = 5
_RESTARTS_WITHIN_S = 60.0

log = logging.getLogger(__name__)


def guard(
    config: DaemonConfig, *, report: Callable[[dict[str, Any]], None], foreground: bool
) -> int:
    """Run a supervisor, and another one whenever it is killed. Returns the last one's exit code.

    One that dies while it stops is not replaced: the end is what was asked for.
    """
    life = Life()
    adopt_orphans()
    try:
        return _restarting(config, life, report, foreground)
    finally:
        end_descendants()  # what jobs started, and nobody could end before


def _restarting(
    config: DaemonConfig, life: Life, report: Callable[[dict[str, Any]], None], foreground: bool
) -> int:
    deaths: list[float] = []
    signals = (signal.SIGTERM, signal.SIGINT)
    while True:
        # Until both have their handlers: a signal between would end one and not the other.
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        child = os.fork()
        if child == 0:
            os._exit(_supervise(config, life, report, foreground))
        for sig in signals:
            signal.signal(sig, partial(_forward, child, life))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        code = os.waitstatus_to_exitcode(_wait_for(child))
        deaths = [when for when in deaths if time.monotonic() - when < _RESTARTS_WITHIN_S]
        deaths.append(time.monotonic())
        if life.end_wanted and (code < 0 or code == _CRASHED):
            return 0
        if (code >= 0 and code != _CRASHED) or len(deaths) > _MOST_RESTARTS:
            return code if code >= 0 else 128 - code


def _wait_for(child: int) -> int:
    # As the first process of a container it inherits orphans, and reaps them here.
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


def _forward(child: int, life: Life, number: int, _: Any) -> None:
    life.want_end()
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


def _supervise(
    config: DaemonConfig, life: Life, report: Callable[[dict[str, Any]], None], foreground: bool
) -> int:
    from .control_requests import answer
    from .supervisor import Supervisor

    try:
        Home(config.home).create()
        _log_to(config, foreground)
        return Supervisor(config, life, report, answer).run()
    except WarmdError as error:
        log.error("%s", error)
        if foreground:
            sys.stderr.write(f"Error: {error}\n")
        report({"error": str(error), "exit_code": error.exit_code})
        return error.exit_code
    except BaseException:
        log.exception("supervisor: crashed")
        return _CRASHED if life.was_warm else 1


class _PrivateLog(logging.handlers.RotatingFileHandler):
    """A rotated log that only its owner reads: prompts may stand in it."""

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=private)


def _log_to(config: DaemonConfig, foreground: bool) -> None:
    handlers: list[logging.Handler] = [
        _PrivateLog(Home(config.home).log, maxBytes=config.log_bytes, backupCount=config.log_files)
    ]
    if foreground:
        handlers.append(logging.StreamHandler())
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", handlers=handlers, force=True
    )
