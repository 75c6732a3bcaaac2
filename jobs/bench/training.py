"""Times the steps of one side; measures its memory and the limit of the hardware.

Imports torch and transformers.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import orjson
import torch
from transformers import PrinterCallback, TrainerCallback

from ..compute.allocator import keep_freed_memory
from ..compute.aten_overrides import fast_kernels
from ..compute.device import has_bfloat16
from ..context import Context, Never
from ..training.arguments import KEPT_ACTIVATIONS
from ..training.loop import Training
from ..training.options import TrainingSpec
from . import machine
from .memory import Peak


def main(works: Mapping[str, Any], make: Callable[[str, Any, Path, int, str, Clock], Any]) -> None:
    """Time one side by the arguments of this process: side, work, folder of its model, steps.

    side: trl or warmd, which trains with warmd's kernels. `make`: (side, work, folder, steps,
    output folder, clock) -> TRL's trainer, or a training of warmd (`own_loop`). Prints the seconds
    of each step except the first, which allocates AdamW's memory, and what was measured.
    """
    side, name, folder, steps = sys.argv[1:]
    torch.manual_seed(0)
    work, count = works[name], int(steps) + 1
    device = machine.device().type
    rates = machine.measure()
    if side == "warmd":
        keep_freed_memory()
    clock = Clock()
    with (
        tempfile.TemporaryDirectory() as output,
        Peak() as peak,
        fast_kernels() if side == "warmd" else nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing", FutureWarning)
        trainer = make(side, work, Path(folder), count, output, clock)
        if isinstance(trainer, Training):
            with suppress(_Done):
                trainer.run(None)
        else:
            trainer.add_callback(clock)
            trainer.remove_callback(PrinterCallback)
            trainer.train()
    measured = {
        "seconds": clock.seconds[1:],
        "processor_s": clock.processor_s[1:],
        "device": device,
        "private_bytes": _device_bytes() if device == "cuda" else peak.private_bytes,
        "resident_bytes": peak.resident_bytes,
        "floor_s": work.floor_s(work.shape.parameters, rates.flops, rates.bytes_s, count),
        "flops": rates.flops,
        "bytes_s": rates.bytes_s,
    }
    sys.stdout.write(orjson.dumps(measured).decode() + "\n")


def settings(output: str, steps: int) -> dict[str, Any]:
    """Return the fields of a config of TRL with its fastest settings on a CPU.

    Its defaults are three times slower.
    """
    device = machine.device()
    return {
        "output_dir": output,
        "max_steps": steps,
        "bf16": has_bfloat16(device),
        **KEPT_ACTIVATIONS,
        "use_cpu": device.type == "cpu",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def _device_bytes() -> int:
    return torch.cuda.max_memory_reserved()


class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Records the duration of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.processor_s: list[float] = []
        self._began = 0.0, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clocks."""
        machine.synchronize()
        self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record a step."""
        machine.synchronize()
        self.seconds.append(time.perf_counter() - self._began[0])
        self.processor_s.append(time.process_time() - self._began[1])


class _Done(Exception):
    """The last step was timed: nothing is to be saved."""


class _Timed:
    """A task whose steps are timed, from the time that their batch is requested."""

    def __init__(self, task: Any, clock: Clock) -> None:
        self._task = task
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def batches(self, first_step: int) -> Iterator[Any]:
        batches = iter(self._task.batches(first_step))
        while True:
            self._clock.on_step_begin()
            yield next(batches)


def context(output: str, device: torch.device) -> Context:
    """Return the context of a training that saves and reports nothing."""
    return Context(
        job_id="bench",
        run_dir=Path(output),
        device=str(device),
        models=cast(Any, None),
        checkpoints=cast(Any, None),
        emit=_ignore,
        stop=Never(),
    )


def own_loop(
    ctx: Context,
    spec: TrainingSpec,
    args: Any,
    model: Any,
    tokenizer: Any,
    task: Any,
    clock: Clock,
    *,
    before_update: Callable[[], None] | None = None,
) -> Training:
    """Return a training of warmd whose steps are timed, and which ends after the last of them."""

    def on_step(step: int, metrics: Mapping[str, Any]) -> None:
        clock.on_step_end()
        if step == args.max_steps:
            raise _Done

    return Training(
        ctx=ctx,
        spec=spec,
        args=args,
        model=model,
        tokenizer=tokenizer,
        task=_Timed(task, clock),
        on_step=on_step,
        before_update=before_update,
    )


def _ignore(type: str, /, *, step: int | None = None, **fields: Any) -> None:
    """Emit nothing."""
