"""Runs a kind in several processes, as a work horse does, apart from the process of the test."""

from __future__ import annotations

import hashlib
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch

from warmd.daemon.fork.rank_processes import run_in_processes
from warmd.daemon.host.descendants import adopt_orphans
from warmd.jobs.context import Context
from warmd.jobs.training.trainer import JobTrainer

Run = Callable[[Context], dict[str, Any]]


def digest(model: Any) -> str:
    """A hash of every bit of the trained weights."""
    found = hashlib.sha256()
    for weight in model.parameters():
        found.update(weight.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def fails_on_rank_1(
    prompts: list[str], completions: list[str], answers: list[str | None]
) -> list[float]:
    """Of three groups, rank 0 scores one and rank 1 two."""
    if len(prompts) > 4:
        raise ValueError("no reward today")
    return [1.0 for _ in prompts]


def run_apart(
    size: int, run: Run, folder: Path, **options: Any
) -> tuple[list[dict[str, Any]], Any]:
    """Run a kind in `size` processes; return rank 0's events, and its result or its error.

    The replicas are compared bit for bit after every step. `options`: attributes of the
    Surroundings; `model`: the warm model.
    """
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run(size, run, folder, writes, options)
    os.close(writes)
    with open(reads, "rb") as file:
        content = file.read()
    os.waitpid(pid, 0)
    assert content, "the processes have died"
    events, outcome = pickle.loads(content)
    return events, outcome


def _run(size: int, run: Run, folder: Path, writes: int, options: dict[str, Any]) -> None:
    outcome: Any
    try:
        adopt_orphans()
        torch.set_num_threads(1)
        JobTrainer.check_replicas = _check_every_bit  # type: ignore[method-assign]
        around = tiny.surroundings(folder, options.pop("model", None))
        for name, value in options.items():
            setattr(around, name, value)
        try:
            if size == 1:
                outcome = run(around.ctx)
            else:
                outcome = run_in_processes(size, run, lambda: None, around.ctx)
        except BaseException as error:  # Stopped, too
            traceback.print_exc()
            outcome = error
        content = pickle.dumps((around.events, outcome))
        with open(writes, "wb") as file:
            file.write(content)
    finally:
        os._exit(0)


def _check_every_bit(self: JobTrainer, norm: float) -> None:
    assert len(set(self.ranks.gather(digest(self.model)))) == 1
