"""Pools of environments in tests: their answers, and that no process is left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from warmd.jobs.environments.pool import Answer, Limits, Pool

GAMES = str(Path(__file__).parents[1] / "environments")  # the folder of `games`


@contextmanager
def pool(environment: str, size: int = 2, **limits: Any) -> Iterator[Pool]:
    """A pool that has left no process when the block ends."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with Pool(environment, [GAMES], size=size, limits=Limits(**limits)) as made:
        yield made
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def answers(made: Pool, number: int = 1) -> dict[Any, Answer]:
    """The next answers, by episode."""
    found: list[Answer] = []
    deadline = time.monotonic() + 60
    while len(found) < number and time.monotonic() < deadline:
        found += made.poll(1.0)
    assert len(found) == number
    return {one.episode: one for one in found}
