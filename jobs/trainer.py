"""What every training kind shares: a Trainer that a job can be stopped in, resumed from and read.

On top of the Trainer of transformers: checkpoints committed whole, a stop at a step's end, no
training on NaN, one event per step, and a resume after which nothing differs from an uninterrupted
run. Imports torch and transformers: only `run` of a kind imports it.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils.logging import disable_progress_bar

from .context import Context
from .durable import whole_folder
from .errors import JobFailed, Stopped

JOB_STATE = "job_state.pt"  # in a checkpoint: what the Trainer's own files leave out


class JobTrainer(Trainer):
    """A Trainer inside a job. Mixed in before another Trainer: `class X(JobTrainer, GRPOTrainer)`.

    Its `args` say `logging_steps=1`, `max_steps` and `logging_nan_inf_filter=False`.
    """

    def __init__(self, *args: Any, job: Context, **kwargs: Any) -> None:
        self.job = job
        self.was_stopped = False
        self.last_metrics: dict[str, Any] = {}  # the fields of the latest step event
        self._step_started = 0.0
        cast(Any, disable_progress_bar)()  # of writing weights: it would fill the job's log
        super().__init__(*args, **kwargs)
        self.remove_callback(PrinterCallback)  # it prints what the events already say
        self.add_callback(_StepEnd(self))

    # For a kind to extend.

    def step_fields(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a step's event, from the Trainer's logs of that step."""
        return {key: logs[key] for key in ("loss", "grad_norm", "learning_rate")}

    def job_state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold beyond the Trainer's own; tensors and plain values."""
        return {"threads": torch.get_num_threads(), "metrics": self.last_metrics}

    def load_job_state(self, state: dict[str, Any]) -> None:
        """Take up what `job_state` returned when the checkpoint was made."""
        self.last_metrics = state["metrics"]
        if state["threads"] != torch.get_num_threads():
            self.job.emit(
                "warning",
                message=f"the checkpoint was made with {state['threads']} threads, this execution "
                f"has {torch.get_num_threads()}: sums round differently from here on",
            )

    # The run.

    def train_to_end(self, checkpoint: Path | None) -> None:
        """Train from a checkpoint, or from the start, to the last step.

        Raises Stopped after the checkpoint that a stop asks for, JobFailed on NaN. A checkpoint
        of the last step, or beyond it, is taken up without training: the Trainer of transformers
        would train one step more.
        """
        if checkpoint is not None and step_of(checkpoint) >= self.args.max_steps:
            self._load_from_checkpoint(str(checkpoint))
            self.load_job_state(_read_job_state(checkpoint))
            self.state.global_step = step_of(checkpoint)
            return
        self.check_weights()
        self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if self.was_stopped:
            raise Stopped(self.state.global_step)

    def write_model(self, folder: Path) -> None:
        """Write weights, configuration and tokenizer, for `from_pretrained`."""
        cast(Any, self.model).save_pretrained(folder)
        if self.processing_class is not None:
            cast(Any, self.processing_class).save_pretrained(folder)

    def save_final_model(self, folder: Path) -> None:
        """Write the trained model to `folder`, whole or not at all."""
        with whole_folder(folder) as staging:
            self.write_model(staging)

    # NaN: looked for where it can still be kept out of the weights.

    def check_weights(self) -> None:
        """Raise JobFailed when a weight is NaN or infinite, or so large that its square is."""
        # By their norm: it is the fastest look at all of them, 0.2 s for a billion bytes.
        weights = [weight.detach() for weight in cast(nn.Module, self.model).parameters()]
        norm = torch.nn.utils.get_total_norm(weights)
        self.must_be_finite("the norm of the weights", float(norm), step=self.state.global_step)

    def must_be_finite(self, what: str, value: float, *, step: int) -> None:
        """Raise JobFailed naming the step when a number is NaN or infinite."""
        if not math.isfinite(value):
            raise JobFailed(f"step {step}: {what} is {value}")

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.must_be_finite("the loss", float(loss), step=self.state.global_step + 1)
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = cast(Any, super())._get_grad_norm(*args, **kwargs)
        self.must_be_finite(
            "the norm of the gradient", float(norm), step=self.state.global_step + 1
        )
        return norm

    # Events.

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        # The events are the history. The Trainer's own would grow inside every checkpoint.
        self.state.log_history.clear()
        if "loss" not in logs:  # the summary at the end of train()
            return
        self.last_metrics = self.step_fields(logs)
        self.job.emit(
            "step",
            step=self.state.global_step,
            steps_total=self.state.max_steps,
            **self.last_metrics,
        )

    def step_seconds(self) -> float:
        """Return how long the step that ends now has taken."""
        return time.perf_counter() - self._step_started

    # Checkpoints.

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        started = time.perf_counter()
        step = self.state.global_step
        with self.job.checkpoints.commit(step) as folder:
            self.write_model(folder)
            self._save_optimizer_and_scheduler(str(folder))
            self._save_rng_state(str(folder))
            torch.save(self.job_state(), folder / JOB_STATE)
            self.state.save_to_json(str(folder / TRAINER_STATE_NAME))
            size_bytes = sum(path.stat().st_size for path in folder.iterdir())
        self.job.emit(
            "checkpoint",
            step=step,
            path=f"checkpoint-{step}",
            bytes=size_bytes,
            seconds=time.perf_counter() - started,
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        self._set_learning_rate()
        self.load_job_state(_read_job_state(Path(checkpoint)))

    def _set_learning_rate(self) -> None:
        # The rate is saved with the optimizer. Where the number of steps has changed since, it
        # would be one of the old schedule (0.0 at a linear one's end) for the next step.
        schedule = cast(LambdaLR, self.lr_scheduler)
        rates = [
            base * factor(schedule.last_epoch)
            for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        schedule._last_lr = rates
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


class _StepEnd(TrainerCallback):
    """Looks at the weights and at the stop request between a step and its checkpoint."""

    def __init__(self, trainer: JobTrainer) -> None:
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._step_started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.check_weights()
        if self.trainer.job.stop.is_set():
            self.trainer.was_stopped = True
            control.should_save = control.should_training_stop = True


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _read_job_state(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(
        checkpoint / JOB_STATE, map_location="cpu", weights_only=True
    )
    return state
