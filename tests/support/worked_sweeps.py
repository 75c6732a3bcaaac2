"""Sweeps whose jobs the test runs itself, and processes that are killed at a chosen line."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from desks import Desk, Run

from warmd.configs.config import load
from warmd.daemon.client.client import Client

WATCHED = (
    "sweeps",
    "curriculum",
    "lifecycle",
    "runs",
    "queue",
    "files",
)  # folders whose lines count


def planned(desk: Desk, **given: Any) -> str:
    """Make the folder of a sweep that is not submitted yet; return its id."""
    from warmd.daemon.client import sweep_plans
    from warmd.daemon.groups.sweep import SweepFolder

    values = {"model": desk.grpo[3], "samples": 9, "num_generations": 2}
    sweep, state = sweep_plans.plan(desk.client.jobs, "grpo", values, given)
    with SweepFolder.creating(desk.home, sweep, state):
        pass
    return sweep.id


def advance(desk: Desk, sweep_id: str) -> None:
    """Run the work of the sweep's process once."""
    from warmd.daemon.groups.driver import advance
    from warmd.daemon.groups.sweep import SweepFolder

    advance(desk.client.places, SweepFolder(desk.home, sweep_id))


def lines_of_advance(desk: Desk, sweep_id: str) -> int:
    """The same in another process; return the lines of warmd that it ran."""
    return ended_at(None, lambda: _advance_anew(desk.home.path, sweep_id))


def advance_killed(desk: Desk, sweep_id: str, line: int) -> None:
    """The same in a process that is killed before it runs that line."""
    ended_at(line, lambda: _advance_anew(desk.home.path, sweep_id))


def _advance_anew(home: Path, sweep_id: str) -> None:
    from warmd.daemon.groups.driver import advance
    from warmd.daemon.groups.sweep import SweepFolder

    client = Client(load(home=home, environ={}))  # with a connection of its own
    advance(client.places, SweepFolder(client.home, sweep_id))


def ended_at(line: int | None, work: Callable[[], None]) -> int:
    """Do some work in a process of its own; return the lines of `WATCHED` that it ran.

    It kills itself before the given one; None: it does all of it.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        count = 0

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal count
            if Path(frame.f_code.co_filename).parent.name not in WATCHED:
                return None
            if event == "line":
                count += 1
                if count == line:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        try:
            work()
            sys.settrace(None)
            os.write(writing, str(count).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        written = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) == (line is not None)
    return int(written or 0)


def queued(desk: Desk) -> list[str]:
    """The ids in the queue, in its order."""
    found: Any = desk.client.connection.lrange("rq:queue:train", 0, -1)
    return [job_id.decode() for job_id in found]


def play_to(desk: Desk, step: int, reward: float) -> Run:
    """Run the next job up to a step at which it stops by itself."""
    run = desk.begin()
    for number in range(1, step + 1):
        run.log.emit("step", step=number, steps_total=9, loss=0.5, reward=reward)
    run.log.emit("stopped", step=step, reason="reached its last requested step")
    run.store.stop(run.job, run.execution, "stopped on request")
    return run
