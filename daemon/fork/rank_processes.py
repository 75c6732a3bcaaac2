"""The ranks of a job on one machine: forked by its horse, which is the first of them, and ended
with it.

They have the horse's libraries and weights by copy-on-write. The death of a rank ends the horse by
SIGKILL, and with it all others: the job is requeued as after any death of a horse. A rank that
fails reports why, and the job fails. On several machines each has such a horse (following.py).

Rank 0 writes, the others compute. Stop and pause requests are for rank 0 alone. When it stops or
waits at the end of a step, the others wait for it in their next exchange: they hold nothing that it
must save.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ...jobs.context import Checkpoints, Context, Never, Ranks, Save
from ...jobs.errors import JobFailed, WarmdError
from ...jobs.user_code import tracebacks
from ..host import rank_names
from ..host.parent_death import end_with_parent
from .libraries import pause_openmp
from .rendezvous import Rendezvous

if TYPE_CHECKING:
    from ...jobs.training.rank_group import RankGroup

log = logging.getLogger(__name__)

_FAILED = b"failed "
_DONE = b"done"
_REPORT_S = 30.0  # for the report of a rank after its connections have closed
_NOTICE_S = 5.0  # for this process to notice that a rank has failed before all were connected

Broken = Callable[[Exception], NoReturn]  # called when the connections of a rank have broken


class RanksLost(WarmdError):
    """The connections to ranks on other machines have broken."""


def run_in_processes(
    size: int,
    run: Callable[[Context], dict[str, Any]],
    prepare: Callable[[], None],
    context: Context,
) -> dict[str, Any]:
    """Run a kind in `size` processes of this machine, of which this one is rank 0.

    Returns its result. `prepare` is called in each of the others. Raises JobFailed when one of them
    fails.
    """
    from ...jobs.training.local_group import LocalChannels, LocalGroup

    connect = partial(LocalGroup, LocalChannels(size))
    return _run_ranks(size, connect, run, prepare, context, is_spread=False)


def run_on_nodes(
    rendezvous: Rendezvous,
    run: Callable[[Context], dict[str, Any]],
    prepare: Callable[[], None],
    context: Context,
    *,
    on_met: Callable[[], None],
    software: Mapping[str, str | None],
) -> dict[str, Any]:
    """Run the ranks of this node, of which this process is the first; return its result.

    `on_met` is called in it when all ranks of the job are connected. `software`: what must be the
    same on all nodes. Raises JobFailed when a rank of this node fails, and RanksLost when others
    cannot be reached.
    """
    from ...jobs.training.gloo_group import GlooGroup

    def connect(number: int, on_broken: Broken) -> GlooGroup:
        made = GlooGroup(rendezvous, rendezvous.first_rank + number, on_broken)
        _require_equal(made.gather(software))
        return made

    def met() -> None:
        rendezvous.close()
        on_met()

    with closing(rendezvous):
        return _run_ranks(
            rendezvous.per_node, connect, run, prepare, context, on_met=met, is_spread=True
        )


def _run_ranks(
    size: int,
    connect: Callable[[int, Broken], RankGroup],
    run: Callable[[Context], dict[str, Any]],
    prepare: Callable[[], None],
    context: Context,
    *,
    on_met: Callable[[], None] = lambda: None,
    is_spread: bool,
) -> dict[str, Any]:
    """Run `size` ranks on this machine, each with the group that `connect` makes in its process."""

    def run_rank(number: int, on_broken: Broken) -> None:
        prepare()
        with closing(connect(number, on_broken)) as group:
            run(context_of_rank(context, group))

    with RankProcesses(size, run_rank, is_spread=is_spread) as ranks:
        first = connect(0, ranks.broken)
        ranks.met()
        on_met()
        return run(context_of_rank(context, first))


def _require_equal(software: Sequence[Mapping[str, str | None]]) -> None:
    """Raise JobFailed unless all ranks have the same software: their weights would differ."""
    first = software[0]
    for other in software:
        for name, there in other.items():
            if there != first.get(name):
                raise JobFailed(
                    f"nodes: must have the same {name}, got {first.get(name)} and {there}"
                )


class RankProcesses:
    """The other ranks of this machine. A context manager, in the first one: leaving it ends them.

    `run` is called in each with its number on this machine and what to call when its connections
    break. Fork before the first computation of several threads: a forked child would wait for them
    forever. `is_spread`: other machines have ranks, too.
    """

    def __init__(self, size: int, run: Callable[[int, Broken], None], *, is_spread: bool) -> None:
        self._is_spread = is_spread
        self._failure: str | None = None  # of the first rank that failed
        self._has_failed = threading.Event()
        self._have_met = False
        self._is_ending = False
        self._wake, self._waker = os.pipe()
        self._ranks: list[_Rank] = []
        sys.stdout.flush()  # otherwise every rank would write the buffered text
        sys.stderr.flush()
        pause_openmp()
        for rank in range(1, size):
            self._ranks.append(self._fork(rank, run))
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending = True
        os.write(self._waker, b"\0")
        self._watcher.join()
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
        for rank in self._ranks:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(rank.pid, 0)
            rank.close()
        os.close(self._wake)
        os.close(self._waker)

    def met(self) -> None:
        """Called when all ranks are connected."""
        self._have_met = True

    def broken(self, error: Exception) -> NoReturn:
        """Raise JobFailed with the report of a rank that failed, or RanksLost.

        Called in the first rank when its connections have broken. If a rank of this machine has
        died instead, the watcher ends this process; if another machine has failed, the worker does.
        """
        from ...jobs.training.gloo_group import UNREACHABLE_S, is_unreachable

        if is_unreachable(error):
            reason = f"processes: another node could not be reached for {UNREACHABLE_S} s"
        elif isinstance(error, TimeoutError):
            reason = f"nodes: {error}"
        else:
            self._has_failed.wait(_REPORT_S)
            reason = f"processes: their connections have broken: {error}"
        if self._failure is None and self._is_spread:
            raise RanksLost(reason) from error
        raise JobFailed(self._failure or reason) from error

    def _fork(self, rank: int, run: Callable[[int, Broken], None]) -> _Rank:
        parent = os.getpid()
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            end_with_parent(parent)
            rank_names.name_this_process(rank)
            # A request to stop is for the horse; a container or a group may send it to all. Not
            # SIG_IGN for SIGTERM: programs that the job starts would inherit it.
            signal.signal(signal.SIGTERM, lambda *_: None)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for descriptor in (reads, self._wake, self._waker):
                os.close(descriptor)
            for other in self._ranks:
                other.close()
            _become_rank(rank, run, writes)
        os.close(writes)
        return _Rank(rank, pid, reads)

    def _watch(self) -> None:
        """Wait for the ranks to end. Ends this process when one of them dies."""
        running = {rank.pidfd: rank for rank in self._ranks}
        has_failed = False
        while running or (has_failed and not self._have_met):
            timeout_s = _NOTICE_S if has_failed and not self._have_met else None
            ready, _, _ = select.select([self._wake, *running], [], [], timeout_s)
            if self._is_ending:
                return
            if not ready and not self._have_met:
                self._end(f"a rank has failed before all were connected: {self._failure}")
            for descriptor in ready:
                rank = running.pop(descriptor)
                report = rank.report()
                if report.startswith(_FAILED):
                    self._failure = report.removeprefix(_FAILED).decode(errors="replace")
                    self._has_failed.set()
                    has_failed = True
                elif report != _DONE:
                    self._end(f"rank {rank.number} {rank.end()}")

    def _end(self, reason: str) -> None:
        log.critical("%s: ending all ranks", reason)
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


class _Rank:
    """A forked rank, as rank 0 sees it."""

    def __init__(self, number: int, pid: int, reports: int) -> None:
        self.number = number
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self._reports = reports

    def report(self) -> bytes:
        """Return its report."""
        os.set_blocking(self._reports, False)  # a process that it started may have the other end
        try:
            return os.read(self._reports, 1 << 20)
        except BlockingIOError:
            return b""

    def end(self) -> str:
        """Describe how it ended."""
        try:
            found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # code of the job has reaped it
            return "has ended"
        if found is None or found.si_code == os.CLD_EXITED:
            return f"ended with status {0 if found is None else found.si_status}"
        return f"was killed by {signal.Signals(found.si_status).name}"

    def close(self) -> None:
        os.close(self.pidfd)
        os.close(self._reports)


def _become_rank(rank: int, run: Callable[[int, Broken], None], reports: int) -> NoReturn:
    """Run a rank in the forked process; report how it ended."""
    report = b""
    try:
        run(rank, _wait_for_end)
        report = _DONE
    except WarmdError as error:
        report = _FAILED + tracebacks.cut(str(error), tracebacks.MOST_TRACE).encode()
    except BaseException as error:  # also SystemExit, as in the horse
        sys.stderr.write(tracebacks.trace(error))  # the job's log
        report = _FAILED + tracebacks.reason(error).encode()
    finally:
        with contextlib.suppress(OSError):
            os.write(reports, report[: 1 << 15])  # fits into a pipe
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0 if report else 1)  # never unwind into the stack of the horse


def _wait_for_end(error: Exception) -> NoReturn:
    """Wait to be killed: another rank has failed or died, and the first one ends all ranks.

    A TimeoutError ends this rank, and with it all: the first one may be connected to all others.
    """
    if isinstance(error, TimeoutError):
        log.critical("nodes: %s", error)
        os._exit(1)
    while True:
        signal.pause()


def context_of_rank(context: Context, ranks: Ranks) -> Context:
    """Return the context of this rank, given that of the job."""
    checkpoints = _SharedCheckpoints(context.checkpoints, ranks, context.run_dir)
    if ranks.rank == 0:
        return replace(context, checkpoints=checkpoints, ranks=ranks)
    return replace(
        context,
        checkpoints=checkpoints,
        ranks=ranks,
        emit=_emit_nothing,
        working=_report_nothing,
        stop=Never(),
        pause=Never(),
        stop_at=None,
    )


class _SharedCheckpoints:
    """The checkpoints of a job, of which rank 0 finds the latest for all."""

    def __init__(self, checkpoints: Checkpoints, ranks: Ranks, run_dir: Path) -> None:
        self._checkpoints = checkpoints
        self._ranks = ranks
        self._run_dir = run_dir

    def latest(self) -> Path | None:
        found = self._ranks.from_first(self._latest)
        return None if found is None else self._run_dir / found

    def _latest(self) -> str | None:
        # Relative: the run directory has another path on other machines.
        found = self._checkpoints.latest()
        return None if found is None else os.path.relpath(found, self._run_dir)

    def save(
        self,
        step: int,
        prepare: Callable[[Any], Callable[[], None]],
        *,
        about: Mapping[str, Any],
    ) -> Save:
        return self._checkpoints.save(step, prepare, about=about)

    def about(self, checkpoint: Path) -> dict[str, Any]:
        return self._checkpoints.about(checkpoint)


def _emit_nothing(type: str, /, *, step: int | None = None, **fields: Any) -> None:
    """Rank 0 emits the events of all."""


def _report_nothing(activity: object) -> None:
    """The watchdog watches rank 0."""
