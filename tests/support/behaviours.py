"""Reward functions that make a real job behave as a test wants: wait, break, die.

Named as `behaviours:NAME`. Every row's answer names the test's own folder; files in it steer them.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from warmd.daemon.fork.worker_connection import JobControl
from warmd.jobs.training import health


def steps_seen(folder: Path) -> int:
    """The number of calls of a reward in all executions."""
    path = folder / "calls"
    return len(path.read_bytes()) if path.exists() else 0


def _note(answers: list[str | None]) -> Path:
    folder = Path(answers[0] or "")
    with open(folder / "calls", "ab") as file:
        file.write(b".")
    return folder


def scores(texts: Sequence[str]) -> list[float]:
    """The scores of all rewards here that score."""
    return [len(text) / 10 + sum(text.encode()) % 100 / 1000 for text in texts]


def length(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """Longer is better, and texts of one length differ by their letters; takes no time."""
    _note(answers)
    return scores(completions)


def slow_at_gate(
    prompts: list[str], completions: list[str], answers: list[str | None]
) -> list[float]:
    """The same, but half a second later while the file `gate` exists."""
    if Path(answers[0] or "", "gate").exists():
        time.sleep(0.5)
    return length(prompts, completions, answers)


def paced(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """The same, at most twenty times per second: it leaves the processor to others."""
    time.sleep(0.05)
    return length(prompts, completions, answers)


def fails_elsewhere(
    prompts: list[str], completions: list[str], answers: list[str | None]
) -> list[float]:
    """Fails in all processes of a job but the first, by the variables of torchrun."""
    if os.environ["RANK"] != "0":
        raise ValueError(f"no reward on rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
    return [1.0 for _ in completions]


def gated(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """The same, but from the third call on it waits while the file `gate` exists.

    While it waits it creates a file `requested` as soon as its process has received a request to
    pause or stop.
    """
    folder = _note(answers)
    while steps_seen(folder) >= 3 and (folder / "gate").exists():
        if _is_requested():
            (folder / "requested").touch()
        time.sleep(0.01)
    return scores(completions)


def _is_requested() -> bool:
    # The controls of the one job of this process, wherever the horse keeps them.
    controls = [found for found in gc.get_objects() if type(found) is JobControl]
    return any(order.pause.is_set() or order.stop.is_set() for order in controls)


def dies(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """Kills its own process at every third call."""
    folder = _note(answers)
    if steps_seen(folder) % 3 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return scores(completions)


def devours(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """Takes more memory than there is."""
    _note(answers)
    return [float(len(bytearray(10**9))) for _ in completions]


def raises(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """Raises an error while the file `broken` exists."""
    folder = _note(answers)
    if (folder / "broken").exists():
        raise RuntimeError("the reward is broken")
    return scores(completions)


def rants(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """Raises an error with a message of ten megabytes."""
    raise RuntimeError("a" * 20_000_000 + "and so on")


def fickle(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """Another reward at every call: no training on it can be repeated."""
    _note(answers)
    return [float(byte) for byte in os.urandom(len(completions))]


def tires(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """Less from call to call."""
    return [1 / steps_seen(_note(answers))] * len(completions)


def _lengths(texts: list[str]) -> list[float]:
    return scores(texts)


def _length(text: str) -> float:
    return scores([text])[0]


def leaves_processes(
    prompts: list[str], completions: list[str], answers: list[str | None]
) -> list[float]:
    """Starts processes that would outlive it, one in its own session; records their ids."""
    folder = _note(answers)
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)  # longer than any test's time limit: it ends in time only if it is killed
        os._exit(0)
    # A grandchild that sleeps as long, for the same reason, and whose parent exits at once.
    script = "import os, time; print(os.fork() or time.sleep(600), flush=True); os._exit(0)"
    command = [sys.executable, "-S", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        orphan = parent.stdout.readline()  # of a process that has ended: it has no parent here
    with open(folder / "processes", "ab") as file:
        file.write(b"%d\n%s" % (child, orphan))
    while (folder / "gate").exists():
        time.sleep(0.01)
    return _lengths(completions)


def forks(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """Returns in two processes: the horse and a forked child."""
    _note(answers)
    os.fork()
    return _lengths(completions)


_pool: list[multiprocessing.pool.Pool] = []


def pooled(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """Scores in a pool of processes that lives as long as the job, and in one that it closes."""
    _note(answers)
    fork = multiprocessing.get_context("fork")
    if not _pool:
        _pool.append(fork.Pool(2))
    with fork.Pool(1) as short:
        assert short.map(_length, ["x"]) == scores(["x"])
    return _pool[0].map(_length, completions)


def long_message(
    prompts: list[str], completions: list[str], answers: list[str | None]
) -> list[float]:
    """Raises an error with a message of ten megabytes."""
    _note(answers)
    raise BaseException("x" * 10_000_000)


def hangs(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """Hangs at the eighth call while the file `gate` exists; a step counts as stalled early."""
    health.SHORTEST_STALL_S = 0.3
    folder = _note(answers)
    while steps_seen(folder) == 8 and (folder / "gate").exists():
        time.sleep(0.01)
    return _lengths(completions)


def hangs_alone(
    prompts: list[str], completions: list[str], answers: list[str | None]
) -> list[float]:
    """The same for ever, without letting any other thread of its process run."""
    health.SHORTEST_STALL_S = 0.3
    if steps_seen(_note(answers)) == 8:
        # A thread of the horse reports the activity to the worker once a second, and PyDLL, which
        # keeps the GIL, stops that thread. No condition in this process says that the worker has
        # the report, so this waits for more than one period.
        time.sleep(1.5)
        ctypes.PyDLL(None).sleep(600)
    return _lengths(completions)
