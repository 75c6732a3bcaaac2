"""A job kind for tests of the daemon alone: it does what it is told, and needs no training.

`register` makes it known to this process; a process that is started with `environment` knows it
from its first moment.
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

from warmd.jobs import KINDS, Kind
from warmd.jobs.context import Context
from warmd.jobs.errors import Stopped
from warmd.jobs.spec import Spec, option


@dataclass(frozen=True, kw_only=True)
class DrillSpec(Spec):
    """What to do."""

    kind: ClassVar[str] = "drill"
    queue: ClassVar[str] = "infer"

    model: str = option("tiny", "warm model", group="model")
    gate: str | None = option(None, "waits while this file exists", group="data")
    then: str = option(
        "end", "what follows", group="data", choices=("end", "raise", "die", "leave")
    )


def run(spec: DrillSpec, ctx: Context) -> dict[str, Any]:
    """Say where it runs, wait at the gate, and end as told."""
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


def register() -> None:
    """Add the kind to those of this process."""
    KINDS["drill"] = Kind("drill", "DrillSpec", "drill", "drill")
    sys.modules["warmd.jobs.drill"] = sys.modules[__name__]


def environment(folder: Path) -> str:
    """Return a PYTHONPATH by which a daemon's processes register the kind; writes to `folder`."""
    code = "import sys\nif 'warmd.daemon' in ' '.join(sys.orig_argv):\n"
    code += "    import drill\n    drill.register()\n"
    (folder / "sitecustomize.py").write_text(code)
    here = str(Path(__file__).resolve().parent)
    return os.pathsep.join([str(folder), here, os.environ.get("PYTHONPATH", "")])
