"""A job kind for tests of the daemon: it does what its options say, without training.

It is a kind from outside: `install` makes it known to this process and to those started later.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import packages

from warmd.jobs.context import Context
from warmd.jobs.errors import Stopped
from warmd.jobs.spec import Spec, option


@dataclass(frozen=True, kw_only=True)
class DrillSpec(Spec):
    """What to do."""

    kind: ClassVar[str] = "drill"
    queue: ClassVar[str] = "infer"
    run_module: ClassVar[str | None] = "drill"

    model: str = option("tiny", "warm model", group="model")
    gate: str | None = option(None, "waits while this file exists", group="data")
    then: str = option(
        "end", "what follows", group="data", choices=("end", "raise", "die", "leave")
    )


def run(spec: DrillSpec, ctx: Context) -> dict[str, Any]:
    """Report where it runs, wait at the gate, and end as its options say."""
    warm = ctx.models.take(spec.model)
    ctx.emit("begin", thread=threading.current_thread().name)
    while spec.gate is not None and Path(spec.gate).exists():
        if ctx.stop.is_set():
            raise Stopped(0)
        time.sleep(0.002)
    if spec.then == "raise":
        raise RuntimeError("as told")
    if spec.then == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if spec.then == "leave":  # with a save in flight
        ctx.checkpoints.save(1, lambda _: lambda: time.sleep(0.5), about={})
        raise RuntimeError("as told")
    return {"pid": os.getpid(), "model": id(warm.model), "niceness": os.nice(0)}


def install(folder: Path) -> str:
    """Install the kind in `folder` for this process; return a PYTHONPATH for others."""
    packages.install(folder, "warmd-drill", {"drill": "drill:DrillSpec"})
    sys.path.append(str(folder))
    packages.look_again()
    here = str(Path(__file__).resolve().parent)
    return os.pathsep.join([str(folder), here, os.environ.get("PYTHONPATH", "")])
