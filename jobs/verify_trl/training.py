"""Trains the first steps of a job on both sides, one after the other. Imports torch and trl."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from peft import LoraConfig
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerCallback

from ..compute.aten_overrides import fast_kernels
from ..context import Context, Never, WarmModel
from ..spec import Spec
from ..training.arguments import in_float32
from ..training.lora import without_dropout
from .compare import Rounding, Side, Step, compare
from .groups import grpo
from .options import comparable
from .rows import dpo, sft
from .sides import Prepare, Stock

Report = Callable[[str], None]  # receives a description of what is being done
Read = Callable[[], WarmModel]  # reads the initial weights of the job

_PREPARE: Mapping[str, Prepare] = {"sft": sft, "dpo": dpo, "grpo": grpo}


def verify(
    spec: Spec,
    read: Read,
    *,
    job_id: str,
    scratch: Path,
    rules: int,
    code_folders: Sequence[str],
    steps: int,
    report: Report,
) -> dict[str, Any]:
    """Train up to `steps` steps of the job on both sides; return what `compare` finds.

    `scratch`: an empty folder, the run directory of both sides. `rules`: of the job's spec. The
    result has also `changed`: one line for each option that is another one here. Raises WarmdError.
    """
    own, changed = comparable(spec)
    with ExitStack() as stack:
        report("reading the model")
        warm = read()
        if _turn_dropout_off(warm.model):
            changed.append("dropout of the model: 0 on both sides, whose random numbers differ")
        events = _Events(steps, report)
        ctx = Context(
            job_id=job_id,
            run_dir=scratch,
            device="cpu",
            models=_Model(warm),
            checkpoints=cast(Any, None),  # none is read or written
            emit=events.emit,
            stop=Never(),
            rules=rules,
            code_folders=tuple(code_folders),
        )
        report("reading the data")
        sides = _PREPARE[own.kind](own, ctx, warm, stack)
        training = sides.training
        assert training.steps_total is not None  # `verify` refuses a time limit
        steps = min(steps, training.steps_total)
        if sides.most_steps < steps:
            steps = sides.most_steps
            changed.append(f"steps: {steps}, one pass over the data")
        events.last = steps
        begun = _trained(training.model)
        events.begin_step()
        with fast_kernels(), suppress(_Done):
            training.run(None)
        ours = Side(events.steps, _trained(training.model))
        lora = _lora_config(training.model)
        report("TRL: making the trainer")
        theirs, rounding = _train_stock(sides.trainer, read, ctx, begun, lora, steps, report)
    report("comparing the weights")
    return {**compare(begun, theirs, ours, rounding), "changed": changed}


class _Done(Exception):
    """The last step was trained: nothing is to be saved."""


@dataclass
class _Events:
    """The events of warmd's side, which ends it after the last step."""

    last: int
    report: Report
    steps: list[Step] = field(default_factory=list)

    def emit(self, type: str, /, *, step: int | None = None, **fields: Any) -> None:
        if type != "step":
            return
        self.steps.append(Step(fields["loss"], fields["grad_norm"], fields["learning_rate"]))
        if len(self.steps) == self.last:
            raise _Done
        self.begin_step()

    def begin_step(self) -> None:
        self.report(f"warmd: step {len(self.steps) + 1} of {self.last}")


@dataclass(frozen=True)
class _Model:
    """The job's one model (jobs.context.Models)."""

    warm: WarmModel

    def take(self, name: str) -> WarmModel:
        return self.warm


def _train_stock(
    make: Callable[[Stock], Any],
    read: Read,
    ctx: Context,
    begun: Mapping[str, Tensor],
    lora: LoraConfig | None,
    steps: int,
    report: Report,
) -> tuple[Side, Rounding]:
    warm = read()
    model = in_float32(warm.model).requires_grad_(lora is None)
    _turn_dropout_off(model)
    with tempfile.TemporaryDirectory(dir=ctx.run_dir) as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing", FutureWarning)
        # TRL 1.16 warns that rollout_func may change; PEFT, that GPT-2's layers are transposed.
        warnings.filterwarnings("ignore", "You are using 'rollout_func'", UserWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out", UserWarning)
        trainer = make(Stock(ctx, Path(folder), warm, model, lora))
        weights = dict(_learned(trainer.model))
        if weights.keys() != begun.keys():
            raise AssertionError(f"other weights in TRL: {sorted(weights.keys() ^ begun.keys())}")
        for name, weight in weights.items():  # an adapter's are random
            weight.data.copy_(begun[name])
        watcher = _Watcher(steps, report)
        trainer.add_callback(watcher)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return Side(watcher.steps, _trained(trainer.model)), watcher.rounding


class _Watcher(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Keeps what TRL's trainer logs of each step, and ends it after the last one."""

    def __init__(self, last: int, report: Report) -> None:
        self.steps: list[Step] = []
        self.rounding = Rounding()
        self._last = last
        self._report = report

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step."""
        self._report(f"TRL: step {state.global_step + 1} of {self._last}")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Measure the gradients."""
        self.rounding.add({name: weight.grad for name, weight in _learned(given["model"])})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the training after the last step."""
        control.should_training_stop |= state.global_step == self._last

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep loss and gradient norm; the summary at the end has none."""
        if "grad_norm" in logs:
            rate = float(logs["learning_rate"])
            self.steps.append(Step(float(logs["loss"]), float(logs["grad_norm"]), rate))


def _learned(model: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, one) for name, one in model.named_parameters() if one.requires_grad)


def _trained(model: Any) -> dict[str, Tensor]:
    """Return copies of the weights that are trained."""
    return {name: weight.detach().clone() for name, weight in _learned(model)}


def _lora_config(model: Any) -> LoraConfig | None:
    found = getattr(model, "peft_config", None)
    return copy.deepcopy(found["default"]) if found else None


def _turn_dropout_off(model: Any) -> bool:
    """Turn the dropout of layers and of attention off; return whether there was any."""
    has_any = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            has_any |= module.p > 0
        elif isinstance(probability := getattr(module, "attention_dropout", None), float):
            has_any |= probability > 0
            module.attention_dropout = 0.0
    without_dropout(model)
    return has_any
