"""Reward functions that make a real job behave as a test wants: wait, break, die.

Named as `behaviours:NAME`. Every row's answer names the test's own folder; files in it steer them.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path

from warmd.daemon.horse import Orders


def steps_seen(folder: Path) -> int:
    """How many times a reward was asked for, by all executions together."""
    path = folder / "calls"
    return len(path.read_bytes()) if path.exists() else 0


def _note(answers: list[str | None]) -> Path:
    folder = Path(answers[0] or "")
    with open(folder / "calls", "ab") as file:
        file.write(b".")
    return folder


def length(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """Longer is better; takes no time."""
    _note(answers)
    return [len(text) / 10 for text in completions]


def gated(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """The same, but from the third call on it waits while the file `gate` exists.

    While it waits it makes a file `told` as soon as its process was told to pause or to stop.
    """
    folder = _note(answers)
    while steps_seen(folder) >= 3 and (folder / "gate").exists():
        if _is_told():
            (folder / "told").touch()
        time.sleep(0.01)
    return [len(text) / 10 for text in completions]


def _is_told() -> bool:
    # The orders of the one job of this process, wherever the horse keeps them.
    orders = [found for found in gc.get_objects() if type(found) is Orders]
    return any(order.pause.is_set() or order.stop.is_set() for order in orders)


def dies(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """Kills its own process at every third call."""
    folder = _note(answers)
    if steps_seen(folder) % 3 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return [len(text) / 10 for text in completions]


def raises(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """Raises an error while the file `broken` exists."""
    folder = _note(answers)
    if (folder / "broken").exists():
        raise RuntimeError("the reward is broken")
    return [len(text) / 10 for text in completions]


def fickle(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """Another reward at every call: no training on it can be repeated."""
    _note(answers)
    return [float(byte) for byte in os.urandom(len(completions))]


def tires(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """Less from call to call."""
    return [1 / steps_seen(_note(answers))] * len(completions)
