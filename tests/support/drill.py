"""A job kind for tests of the daemon: its options determine its behavior, without training.

It is a kind from outside: inside `installed` this process and those that it starts know it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import packages
import pytest

from warmd.jobs.context import Context
from warmd.jobs.errors import Stopped
from warmd.jobs.spec import Spec, option

_kept: list[list[bytes]] = []


@dataclass(frozen=True, kw_only=True)
class DrillSpec(Spec):
    """What to do."""

    kind: ClassVar[str] = "drill"
    queue: ClassVar[str] = "infer"
    run_module: ClassVar[str | None] = "drill"

    model: str = option("tiny", "warm model", group="model")
    gate: str | None = option(None, "waits while this file exists", group="data")
    then: str = option(
        "end",
        "what follows",
        group="data",
        choices=("end", "raise", "die", "leave", "free", "keep"),
    )


def run(spec: DrillSpec, ctx: Context) -> dict[str, Any]:
    """Report its process, wait at the gate, and end as the options require."""
    warm = ctx.models.take(spec.model)
    ctx.emit("begin", thread=threading.current_thread().name)
    while spec.gate is not None and Path(spec.gate).exists():
        if ctx.stop.is_set():
            raise Stopped(0)
        time.sleep(0.002)
    if spec.then == "raise":
        raise RuntimeError("as requested")
    if spec.then == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if spec.then == "leave":  # with a save in flight
        ctx.checkpoints.save(1, lambda _: lambda: time.sleep(0.5), about={})
        raise RuntimeError("as requested")
    if spec.then in ("free", "keep"):
        _take_memory(is_kept=spec.then == "keep")
    return {"pid": os.getpid(), "model": id(warm.model), "niceness": os.nice(0)}


def _take_memory(*, is_kept: bool) -> None:
    """Take 300 MB in pieces, which glibc keeps when freed; 100 MB are much from now on."""
    from warmd.daemon.fork import idle_memory

    idle_memory.GROWN_BYTES = 100_000_000  # glibc keeps up to 64 MB of each thread
    blocks = [b"x" * size for size in [100_000] * 3000]
    if is_kept:
        _kept.append(blocks)


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Install the kind in `folder`, for this process and its children, and remove it."""
    packages.install(folder, "warmd-drill", {"drill": "drill:DrillSpec"})
    here = str(Path(__file__).resolve().parent)
    paths = os.pathsep.join([str(folder), here, os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", paths)
        packages.look_again()
        yield
    packages.look_again()
