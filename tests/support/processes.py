"""Runs a kind in several processes, as a work horse does, apart from the process of the test."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tiny
import torch

from warmd.daemon.fork import rank_processes
from warmd.daemon.fork.rank_processes import run_in_processes
from warmd.daemon.host.descendants import adopt_orphans
from warmd.jobs.context import Context
from warmd.jobs.errors import JobFailed, Stopped
from warmd.jobs.training.gradients import sum_gradients
from warmd.jobs.training.loop import Training

Run = Callable[[Context], dict[str, Any]]


def run_apart(
    size: int, run: Run, folder: Path, **options: Any
) -> tuple[list[dict[str, Any]], Any]:
    """Run a kind in `size` processes; return rank 0's events, and its result or its error.

    They are forked from a process of one thread: a test may have computed with several. The
    replicas are compared bit for bit after every step. `options`: attributes of the Surroundings;
    `dropout`: of the warm model; `prepare`: as for run_in_processes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm_imports"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))  # not given the path of this process
        forkserver.ensure_running()
    receives, sends = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(size, run, folder, sends, options))
    process.start()
    sends.close()
    try:
        events, outcome = pickle.loads(receives.recv_bytes())
    except EOFError:
        raise AssertionError("the processes have died") from None
    finally:
        process.join()
        process.close()
        receives.close()
    return events, outcome


def _run(size: int, run: Run, folder: Path, sends: Connection, options: dict[str, Any]) -> None:
    outcome: Any
    try:
        adopt_orphans()
        torch.set_num_threads(1)
        Training._check_replicas = _check_every_bit  # type: ignore[method-assign]
        prepare = options.pop("prepare", lambda: None)
        around = tiny.surroundings(folder, tiny.model(dropout=options.pop("dropout", 0.0)))
        for name, value in options.items():
            setattr(around, name, value)
        try:
            if size == 1:
                outcome = run(around.ctx)
            else:
                outcome = run_in_processes(size, run, prepare, around.ctx)
        except (JobFailed, Stopped) as error:
            outcome = error
        except BaseException as error:
            outcome = RuntimeError("".join(traceback.format_exception(error)))
        sends.send_bytes(pickle.dumps((around.events, outcome)))
    finally:
        os._exit(0)


def digest(model: Any) -> str:
    """A hash of every bit of the weights."""
    found = hashlib.sha256()
    for weight in model.parameters():
        found.update(weight.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _check_every_bit(self: Training, norm: float) -> None:
    assert len(set(self.ctx.ranks.gather(digest(self.model)))) == 1


# Functions that the tests run in the processes.


def fails_on_rank_1(
    prompts: list[str], completions: list[str], answers: list[str | None]
) -> list[float]:
    """A reward: of three groups, rank 0 scores one and rank 1 two."""
    if len(prompts) > 4:
        raise ValueError("no reward today")
    return [1.0 for _ in prompts]


def logs_odd_values(
    completions: list[str], log_extra: Any, log_metric: Any, **kwargs: Any
) -> list[float]:
    """A reward that logs what JSON lacks."""
    log_extra("array", [np.arange(2) for _ in completions])
    log_extra("number", [np.float32(0.5), torch.tensor(1), 2**70, {1: float("nan")}])
    log_extra("path", [Path("a") for _ in completions])
    log_metric("length", np.float32(len(completions[0])))
    return [len(text) / 10 for text in completions]


def add_gradients(ctx: Context) -> dict[str, Any]:
    """Sum random gradients, which only the last rank has of every weight."""
    torch.manual_seed(ctx.ranks.rank)
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in (5, 1000, 3)]
    for weight in weights[: 1 + ctx.ranks.rank]:
        weight.grad = torch.randn_like(weight)

    def gradients() -> list[list[Any]]:
        found = [None if weight.grad is None else weight.grad.tolist() for weight in weights]
        return ctx.ranks.gather(found)

    given = gradients()
    sum_gradients(weights, ctx.ranks)
    return {"given": given, "summed": gradients()}


def cannot_prepare() -> None:
    raise JobFailed("no memory for a copy")


def fails(number: int, on_broken: Any) -> None:
    raise JobFailed("no address")


def meets_a_stranger(number: int, on_broken: Any) -> None:
    on_broken(TimeoutError("a rank has not proved itself"))


def waits_for_rank_1(run: Callable[[int, Any], None], ctx: Context) -> dict[str, Any]:
    """Rank 0 waits to be connected, as for an address, while rank 1 runs `run`."""
    rank_processes._NOTICE_S = 0.1
    with rank_processes.RankProcesses(2, run, is_spread=True):
        time.sleep(60)
    return {}


def random_tensors(rank: int) -> list[torch.Tensor]:
    """Numbers whose sums depend on the order, of several types and sizes."""
    generator = torch.Generator().manual_seed(rank)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
    return [
        (torch.randn(size, generator=generator) * 1000).to(dtype)
        for size in (1, 7, 1001, 700_001)
        for dtype in dtypes
    ]


def add_tensors(ctx: Context) -> dict[str, Any]:
    """Sum random tensors."""
    found = random_tensors(ctx.ranks.rank)
    for one in found:
        ctx.ranks.sum(one)
    return {"sums": found}


def exchange(values: Sequence[Any], ctx: Context) -> dict[str, Any]:
    """Exchange a value of each rank in every way; list what the ranks communicate over."""
    ranks = ctx.ranks
    own = values[ranks.rank]
    gathered = ranks.gather(own)
    first = ranks.from_first(lambda: own)
    order = ctx.run_dir / "order"
    ranks.after_first(lambda: [order.open("a").write(f"{ranks.rank}")])
    kinds = [one.family.name for one in psutil.Process().net_connections(kind="all")]
    return {
        "of_all": ranks.gather({"gathered": gathered, "first": first, "sockets": kinds}),
        "order": order.read_text(),
        "environment": dict(ranks.environment),
    }


def fails_beside_a_child(ctx: Context) -> dict[str, Any]:
    """Rank 1 fails; a process that it has forked has its connections, too, and stays."""
    child = os.fork() if ctx.ranks.rank == 1 else 0
    if child == 0 and ctx.ranks.rank == 1:
        time.sleep(60)
        os._exit(0)
    _, pid = ctx.ranks.gather(child)
    if ctx.ranks.rank == 1:
        raise ValueError("no reward today")
    ctx.emit("child", pid=pid)
    ctx.ranks.gather(None)
    return {}


def of_rank(runs: Sequence[Run], ctx: Context) -> dict[str, Any]:
    """Run a job of which each rank has options of its own, as if its files were others."""
    return runs[ctx.ranks.rank](ctx)
