"""The guardian: the supervisor's parent, which restarts it; simple, so that it does not fail.

A kill -9 of the supervisor is repaired within a second. All other processes end with the
supervisor; the next supervisor finds the queue unchanged, and the jobs resume.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...configs.config import DaemonConfig
from ...jobs.errors import WarmdError
from ...jobs.files import umask
from ...jobs.files.shortage import shortage
from ..host.backoff import backoff_s
from ..host.descendants import adopt_orphans, end_descendants
from ..host.home import Home, private
from ..host.messages import Booted, Failure, Message
from ..host.open_files import raise_open_files_limit
from ..host.systemd import READY, ServiceManager
from .shared_flags import SharedFlags
from .wakeups import STOP_SIGNALS, ignore_signals

Report = Callable[[Message], None]  # receives the progress of the start

_LACKING = 75  # exit code of one that lacks a thread, a process or a descriptor (EX_TEMPFAIL)
_CRASHED = 70  # exit code of a supervisor that crashed (EX_SOFTWARE of sysexits.h)
_MAX_RESTARTS = 5
_RESTARTS_WITHIN_S = 60.0
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0  # between two tries to start a process

log = logging.getLogger(__name__)


def guard(config: DaemonConfig, *, report: Report, foreground: bool) -> int:
    """Run a supervisor and restart it whenever it is killed; return the last exit code.

    A supervisor that dies while the daemon stops is not restarted.
    """
    # A supervisor that is restarted after an upgrade must not mix two versions.
    from . import control_requests, supervisor  # noqa: F401

    umask.restrict()  # for all processes of the daemon
    raise_open_files_limit()
    flags = SharedFlags()
    manager = ServiceManager.from_environ()
    adopt_orphans()
    try:
        return _restart_loop(config, flags, partial(_report, report, manager), manager, foreground)
    finally:
        end_descendants()  # processes that jobs started and whose horse was killed


def _restart_loop(
    config: DaemonConfig,
    flags: SharedFlags,
    report: Report,
    manager: ServiceManager,
    foreground: bool,
) -> int:
    deaths: list[float] = []
    num_lacking = 0  # supervisors in a row that could not start because of a shortage
    ignore_signals()
    while True:
        # Blocked until both processes have set their handlers: a signal in between would end only
        # one of them.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        child = _fork(STOP_SIGNALS)
        if child is None:
            return 0
        if child == 0:
            os._exit(_supervise(config, flags, report, manager, foreground))
        for sig in STOP_SIGNALS:
            signal.signal(sig, partial(_forward, child, flags))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        code = os.waitstatus_to_exitcode(_wait_for(child))
        if code == _LACKING and not flags.is_stop_requested:
            pause_s = backoff_s(num_lacking, first_s=_FIRST_WAIT_S, longest_s=_LONGEST_WAIT_S)
            num_lacking += 1
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            if signal.sigtimedwait(STOP_SIGNALS, pause_s) is not None:
                return 0
            continue
        num_lacking = 0
        deaths = [when for when in deaths if time.monotonic() - when < _RESTARTS_WITHIN_S]
        deaths.append(time.monotonic())
        if flags.is_stop_requested and (code < 0 or code == _CRASHED):
            return 0
        if (code >= 0 and code != _CRASHED) or len(deaths) > _MAX_RESTARTS:
            return code if code >= 0 else 128 - code


def _fork(end: Sequence[signal.Signals]) -> int | None:
    """Fork as soon as the machine can start a process; None if one of the signals `end` came."""
    tries = 0
    while True:
        try:
            return os.fork()
        except OSError as error:
            log.error("guardian: no supervisor: %s", error)
            wait_s = backoff_s(tries, first_s=_FIRST_WAIT_S, longest_s=_LONGEST_WAIT_S)
            if signal.sigtimedwait(end, wait_s) is not None:
                return None
            tries += 1


def _report(report: Report, manager: ServiceManager, message: Message) -> None:
    if isinstance(message, Booted):
        manager.notify(READY)
    report(message)


def _wait_for(child: int) -> int:
    # As process 1 of a container, and as a subreaper, it also reaps orphans.
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


def _forward(child: int, flags: SharedFlags, number: int, _: Any) -> None:
    flags.set_stop_requested()
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


def _supervise(
    config: DaemonConfig,
    flags: SharedFlags,
    report: Report,
    manager: ServiceManager,
    foreground: bool,
) -> int:
    from .control_requests import handle
    from .supervisor import Supervisor

    try:
        Home(config.home).create()
        _log_to(config, foreground)
        return Supervisor(config, flags, report, handle, manager).run()
    except WarmdError as error:
        log.error("%s", error)
        if flags.was_warm and shortage(error) is not None:
            return _LACKING
        if foreground:
            sys.stderr.write(f"Error: {error}\n")
        report(Failure.of(error))
        return error.exit_code
    except BaseException as error:
        lacking = shortage(error)
        if flags.was_warm and lacking is not None:
            log.error("supervisor: waits for %s: %s", lacking.what, lacking.reason)
            return _LACKING
        log.exception("supervisor: crashed")
        return _CRASHED if flags.was_warm else 1


class _PrivateLog(logging.handlers.RotatingFileHandler):
    """A rotated log that only its owner can read: it may contain prompts."""

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
