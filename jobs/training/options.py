"""The options that all training kinds share: optimization, checkpoints, reactions to failures.

Imports no torch; `trainer.py` implements them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self

from ...configs.precision import NATIVE
from ..durations import parse_duration
from ..errors import SpecError
from ..models.adapters import is_adapter
from ..models.weight_headers import matrices
from ..relations import ABOVE_0, GIVEN, Relation, goes_with, never_with
from ..spec import Spec, option, shown

MOST_STEPS = 10**9  # of a job
MOST_ROWS = 10**9  # of its data
MOST_AT_ONCE = 10**5  # samples of one step
MOST_TOKENS = 2**20  # of one sample
MOST_PROCESSES = 1024  # of a job
MOST_RANK = 4096  # of a LoRA adapter
ALL_LINEAR = "all-linear"  # PEFT's name for all linear layers except the vocabulary head
NOT_ON_ADAPTER = (
    "must be trained on a model, got an adapter: `warmd checkpoints export --merge` makes a model "
    "of it"
)
SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")
_NOT_SHARDED = (
    "the weights of a model are not sharded: each of the processes has all of them, and lora takes "
    "far less memory"
)
_MINUTES = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*(?:m|min|minutes?)")


@dataclass(frozen=True)
class SaveInterval:
    """The interval between checkpoints, in steps or in seconds of training."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> SaveInterval:
        """Read `25` (steps) or `10m` (minutes). Raises SpecError."""
        if re.fullmatch("[0-9]{1,10}", text) and 1 <= int(text) <= 10**9:
            return cls(steps=int(text))
        minutes = _MINUTES.fullmatch(text)
        if minutes is None or float(minutes[1]) == 0:
            raise SpecError(
                "save_every",
                f"must be steps such as 25, or minutes such as 10m, got {text[:80]!r}",
            )
        return cls(seconds=60 * float(minutes[1]))


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(Spec, ABC):
    """The options that every training kind has."""

    takes_weights: ClassVar[bool] = True

    # Not data, model, batches, masks, rewards and seed: they determined the checkpoint. Not weight
    # decay: the optimizer state of a checkpoint holds it.
    changeable: ClassVar[tuple[str, ...]] = (
        "steps",
        "time_limit",
        "processes",
        "nodes",
        "learning_rate",
        "lr_scheduler",
        "warmup_steps",
        "max_grad_norm",
        "save_every",
        "keep",
        "keep_best",
        "on_save_error",
        "on_stall",
        "on_divergence",
        "deterministic",
        "report_to",
    )
    otherwise: ClassVar[str] = "start a new job from its weights with --init-from JOB"

    not_supported: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            *("fsdp", "fsdp_config", "deepspeed", "zero_stage", "parallelism_config"),
            *("tensor_parallel", "tensor_parallel_size", "pipeline_parallel_size"),
        ),
        _NOT_SHARDED,
    )

    # The type of model that is trained; kinds of the same type can start from each other's models.
    trains: ClassVar[str] = "decoder"

    # The metrics that `keep_best` accepts, fields of step and eval events; and those to minimize.
    judged_by: ClassVar[tuple[str, ...]] = ("loss",)
    lower_is_better: ClassVar[tuple[str, ...]] = (
        *("loss", "mlm_loss", "mnm_loss", "kl"),
        *("eval_mlm_loss", "eval_mnm_loss"),
    )

    # The metrics by which the points of a sweep are compared: with held-out data, and without.
    compared_by: ClassVar[tuple[str, str]] = ("eval_loss", "loss")

    # The metrics that `on_divergence` watches, each with its scale: see health.Divergence. Below
    # 0.1 nats, variations of a loss are noise.
    watched: ClassVar[Mapping[str, float]] = {"loss": 0.1}

    relations: ClassVar[tuple[Relation, ...]] = (
        never_with("time_limit", steps=GIVEN),
        never_with("warmup_steps", when=ABOVE_0, lr_scheduler="constant"),
        goes_with(
            *("lora_alpha", "lora_targets", "lora_dropout", "base_precision"),
            lora=GIVEN,
        ),
    )

    learning_rate: float | None = option(
        None,
        "AdamW learning rate",
        group="optimization",
        default_text="by model size",
        above=0,
        maximum=1,
    )
    steps: int | None = option(
        None, "optimizer steps in total", group="optimization", minimum=1, maximum=MOST_STEPS
    )
    time_limit: str | None = option(
        None,
        "running time over all executions, such as 5m or 1h30m: as many steps as fit, with the "
        "learning-rate schedule over them, planned from the measured time of a step",
        group="optimization",
        default_text="none: by steps",
    )
    batch_size: int | None = option(
        None,
        "training samples per micro-batch",
        group="optimization",
        minimum=1,
        maximum=MOST_AT_ONCE,
    )
    gradient_accumulation: int | None = option(
        None,
        "micro-batches per optimizer step",
        group="optimization",
        minimum=1,
        maximum=MOST_AT_ONCE,
    )
    lr_scheduler: str = option(
        "linear", "learning-rate schedule after warmup", group="optimization", choices=SCHEDULES
    )
    warmup_steps: int | None = option(
        None,
        "steps of linear learning-rate warmup",
        group="optimization",
        minimum=0,
        maximum=MOST_STEPS,
    )
    weight_decay: float = option(
        0.0, "AdamW weight decay", group="optimization", minimum=0, maximum=10
    )
    max_grad_norm: float = option(
        1.0,
        "norm to which gradients are clipped (0: no clipping)",
        group="optimization",
        minimum=0,
        maximum=1e6,
    )
    processes: int = option(
        1,
        "processes that divide the work of every step, on the cores of one machine; the steps are "
        "those of one process but for rounding and dropout (CPU only)",
        group="optimization",
        minimum=1,
        maximum=MOST_PROCESSES,
    )
    nodes: int = option(
        1,
        "machines that run the job together, each with that many processes; they need a shared "
        "Redis and a shared folder of run directories (CPU only)",
        group="optimization",
        minimum=1,
        maximum=MOST_PROCESSES,
    )
    seed: int = option(
        42,
        "random seed of data order, sampling, masks, dropout and new weights",
        group="optimization",
        minimum=0,
        maximum=2**32 - 1,
    )
    deterministic: bool = option(
        True,
        "deterministic GPU kernels for loss, gradients and update, so that a resume is bit-exact "
        "on the same GPU model, driver and libraries; no effect on a CPU",
        group="optimization",
    )
    lora: int | None = option(
        None,
        "rank of the LoRA adapter that is trained instead of the model's own weights",
        group="lora",
        default_text="none: all weights are trained",
        minimum=1,
        maximum=MOST_RANK,
    )
    lora_alpha: int = option(
        32,
        "LoRA scaling: the low-rank product is multiplied by lora_alpha / rank",
        group="lora",
        minimum=1,
        maximum=10**6,
    )
    lora_targets: tuple[str, ...] = option(
        (ALL_LINEAR,),
        f"layer to adapt, by the last part of its name, such as q_proj; {ALL_LINEAR}: all linear "
        "layers but the vocabulary head",
        group="lora",
    )
    lora_dropout: float = option(
        0.0, "dropout probability of the adapter's input", group="lora", minimum=0, maximum=0.9
    )
    base_precision: str = option(
        NATIVE,
        "precision of the frozen base model of the LoRA adapter; int8: of all its layers except "
        "embeddings and vocabulary head, for generation and loss (CPU only)",
        group="lora",
        choices=(NATIVE, "int8"),
    )
    report_to: tuple[str, ...] = option(
        (),
        "experiment trackers",
        group="evaluation",
        choices=("none", "tensorboard", "wandb", "trackio", "mlflow"),
    )
    save_every: str = option(
        "25", "interval between checkpoints: steps (25) or minutes (10m)", group="checkpoints"
    )
    keep: int = option(
        3, "number of latest checkpoints to keep", group="checkpoints", minimum=1, maximum=10_000
    )
    keep_best: str | None = option(
        None,
        "metric (loss, reward, mlm_acc, …) whose best checkpoint is kept in addition to the "
        "latest ones",
        group="checkpoints",
    )
    on_save_error: str = option(
        "continue",
        "action when a checkpoint cannot be written, for example on a full disk",
        group="stopping",
        choices=("continue", "stop"),
    )
    on_stall: str = option(
        "report",
        "action when a step takes more than ten times the median; stop: the job saves and fails, "
        "or is killed if the step does not end",
        group="stopping",
        choices=("report", "stop"),
    )
    on_divergence: str = option(
        "report",
        "action when the loss (GRPO: also KL or entropy) exceeds three times its median",
        group="stopping",
        choices=("report", "stop"),
    )

    @property
    @abstractmethod
    def steps_total(self) -> int | None:
        """The optimizer steps of the whole job; None: planned from the time limit."""

    @property
    def time_limit_s(self) -> float | None:
        """The time limit in seconds. Raises SpecError."""
        return None if self.time_limit is None else parse_duration("time_limit", self.time_limit)

    @property
    def steps_per_round(self) -> int:
        """The steps after which their work repeats; their times are measured together."""
        return 1

    def warmup_for(self, steps: int) -> int:
        """Return the steps of learning-rate warmup of a training of so many steps."""
        return self.warmup_steps or 0

    @property
    def most_processes(self) -> int:
        """The samples that the processes divide among them; 1: the kind cannot divide its work."""
        return 1

    @property
    def is_measured(self) -> bool:
        """Whether there is held-out data."""
        return False

    @property
    def save_interval(self) -> SaveInterval:
        """The interval between checkpoints. Raises SpecError."""
        return SaveInterval.parse(self.save_every)

    @property
    def best(self) -> tuple[str, bool] | None:
        """The metric of the best checkpoint, and whether lower is better."""
        if self.keep_best is None:
            return None
        return self.keep_best, self.keep_best in self.lower_is_better

    def check(self) -> None:
        super().check()
        SaveInterval.parse(self.save_every)
        if self.time_limit is not None:
            parse_duration("time_limit", self.time_limit)
        if self.processes > self.most_processes:
            raise SpecError(
                "processes",
                f"must be at most {self.most_processes}, the samples that they divide, got "
                f"{self.processes}",
            )
        if self.processes * self.nodes > self.most_processes:
            most = self.most_processes // self.processes
            raise SpecError(
                "nodes",
                f"must be at most {most} with {self.processes} processes on each, as they divide "
                f"{self.most_processes} samples, got {self.nodes}",
            )
        if self.keep_best not in (None, *self.judged_by):
            names = ", ".join(self.judged_by)
            raise SpecError("keep_best", f"must be one of {names}, got {shown(self.keep_best)}")
        if ALL_LINEAR in self.lora_targets[1:] or not self.lora_targets:
            got = ", ".join(self.lora_targets) or "none"
            raise SpecError("lora_targets", f"must be {ALL_LINEAR} or names of layers, got {got}")

    def check_layers(self, folder: Path) -> None:
        """Check that the model has the layers to adapt, and matrices large enough for the rank."""
        if self.lora is None:
            return
        if is_adapter(folder):
            raise SpecError("lora", NOT_ON_ADAPTER)
        ranks = matrices(folder)
        if not ranks:
            return
        for name in self.lora_targets:
            if name not in (ALL_LINEAR, *ranks):
                names = ", ".join(sorted(ranks))
                raise SpecError(
                    "lora_targets", f"must be {ALL_LINEAR} or layers of it ({names}), got {name!r}"
                )
        largest = max(ranks.get(name, max(ranks.values())) for name in self.lora_targets)
        if self.lora > largest:
            raise SpecError(
                "lora", f"must be at most {largest}, the largest rank of a layer, got {self.lora}"
            )

    def changes(self, options: Mapping[str, Any]) -> dict[str, list[Any]]:
        found = super().changes(options)
        if None in found.get("time_limit", ()):
            raise SpecError(
                "time_limit",
                f"cannot be set or unset on resume (the job began with "
                f"{found['time_limit'][0] or 'steps'}); {self.otherwise}",
            )
        return found

    def revised(self, values: Mapping[str, Any]) -> Self:
        spec = super().revised(values)
        spec._check_trackers()
        return spec

    def check_inputs(self, model_settings: Mapping[str, Any] | None) -> None:
        super().check_inputs(model_settings)
        self._check_trackers()

    def _check_trackers(self) -> None:
        for tracker in self.report_to:
            if tracker != "none" and find_spec(tracker) is None:
                raise SpecError("report_to", f"must be installed, got {tracker}, which is not")
