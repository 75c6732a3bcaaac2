"""The Trainer of all training kinds: it can be stopped, paused and resumed exactly.

It adds to the Trainer of transformers: atomic checkpoints, a stop at the end of a step, failure on
NaN before it reaches the weights, one event per step, and a resume that is bitwise equal to an
uninterrupted run. Imports torch and transformers: only `run` of a kind imports it.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PrinterCallback, TrainerCallback

from ..context import Activity, step_of
from ..errors import JobFailed, Stopped
from ..user_code.forks import end_if_forked
from .checkpointing import CheckpointingTrainer
from .determinism import algorithms, random_numbers
from .gradients import sum_gradients
from .health import Divergence, Progress
from .options import TrainingSpec
from .snapshot import read_job_state
from .trackers import tracked


class JobTrainer(CheckpointingTrainer):
    """A Trainer inside a job. Mixed in before another Trainer: `class X(JobTrainer, GRPOTrainer)`.

    Its `args` have `logging_steps=1`, `max_steps`, `logging_nan_inf_filter=False` and
    `save_strategy="no"`: `spec` decides when to save.
    """

    def __init__(self, *args: Any, spec: TrainingSpec, **kwargs: Any) -> None:
        self.last_metrics: dict[str, Any] = {}  # the fields of the latest step event
        self._step_started = 0.0
        self._divergence = Divergence(spec.watched)
        self._owner = os.getpid()
        self._losses_begun = 0  # in the current step
        self.progress = Progress(self._report_activity)
        super().__init__(*args, spec=spec, **kwargs)
        self.progress.begin("start")
        self.remove_callback(PrinterCallback)  # events have the same content
        self.add_callback(_StepEnd(self))

    # Hooks for a kind.

    def step_fields(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a step's event, from the Trainer's logs of that step."""
        return {key: logs[key] for key in ("loss", "grad_norm", "learning_rate")}

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of this step, by the names of event fields."""
        return self.last_metrics

    def evaluate_at_stop(self) -> None:
        """Evaluate the model at the requested stop step, and emit the event.

        The checkpoint is on disk already, so this does not affect later steps.
        """

    def job_state(self) -> dict[str, Any]:
        """Return the state of a checkpoint beyond the Trainer's own: tensors and plain values."""
        return {
            **super().job_state(),
            "metrics": self.last_metrics,
            "divergence": self._divergence.state(),
        }

    def load_job_state(self, state: dict[str, Any]) -> None:
        """Restore what `job_state` returned for a checkpoint."""
        super().load_job_state(state)
        self.last_metrics = state["metrics"]
        self._divergence.load_state(state["divergence"])

    # The run.

    def train_to_end(self, checkpoint: Path | None) -> None:
        """Train from a checkpoint, or from the start, to the last step.

        Raises Stopped after saving on a stop request, JobFailed on NaN. From a checkpoint at or
        beyond the last step nothing is trained; the Trainer of transformers would train one more
        step.
        """
        if checkpoint is not None:
            self.check_checkpoint(checkpoint)
            if self.job.stop_at is not None and step_of(checkpoint) >= self.job.stop_at:
                if self.job.eval_at_stop:
                    self._restore(checkpoint)
                    self.evaluate_at_stop()
                raise Stopped(step_of(checkpoint))  # killed between that save and its end
        if checkpoint is not None and step_of(checkpoint) >= self.args.max_steps:
            self._restore(checkpoint)
            return
        os.environ.update(self.ranks.environment)  # now that the Trainer cannot see it any more
        try:
            trackers = self.spec.report_to if self.ranks.rank == 0 else ()
            with tracked(self.job.job_id, trackers):
                self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
                self.progress.begin("end of the trackers' runs")
            self.progress.end()
        except Exception:
            # Whatever ended the training is raised again below. A save may be in progress: its
            # outcome is reported first. On a full disk the report itself may fail (OSError).
            with suppress(OSError):
                self.saver.report(patience_s=None)
            raise
        if self.was_stopped:
            is_requested = self.job.stop.is_set()
            if self.job.eval_at_stop and not is_requested:
                self.evaluate_at_stop()
            raise Stopped(self.state.global_step)

    def _restore(self, checkpoint: Path) -> None:
        """Restore the model and the state of a checkpoint without training further."""
        self._load_from_checkpoint(str(checkpoint))
        self.load_job_state(read_job_state(checkpoint))
        self.state.global_step = step_of(checkpoint)

    # NaN and Inf, checked before they reach the weights.

    def check_weights(self, *, trained_only: bool = False) -> float:
        """Return the norm of the weights. Raises JobFailed for NaN or Inf in it.

        Called at the end of every step, with `trained_only`: frozen weights do not change.
        Initial weights are checked only after a result was not finite: reading all of them would
        delay the first step.
        """
        # The norm is the fastest check of all weights: 0.2 s for 1 GB.
        weights = [
            weight.detach()
            for weight in cast(nn.Module, self.model).parameters()
            if weight.requires_grad or not trained_only
        ]
        norm = float(torch.nn.utils.get_total_norm(weights))
        if not math.isfinite(norm):
            raise JobFailed(f"step {self.state.global_step}: the norm of the weights is {norm}")
        return norm

    def require_finite(self, what: str, value: float, *, step: int) -> None:
        """Raise JobFailed when a value is NaN or Inf."""
        if not math.isfinite(value):
            self.check_weights()
            raise JobFailed(f"step {step}: {what} is {value}")

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with algorithms(deterministic=self.is_deterministic):
            loss = super().training_step(*args, **kwargs)
        if self.ranks.size > 1 and self.accelerator.sync_gradients:  # the step's last micro-batch
            sum_gradients(cast(nn.Module, self.model).parameters(), self.ranks)
        self.require_finite("the loss", float(loss), step=self.state.global_step + 1)
        return loss

    def compute_loss_context_manager(self) -> ExitStack:
        """Compute a loss with random numbers of this rank, seeded by (seed, rank, step, loss).

        All other random numbers of a step are the same on every rank, and so in a checkpoint.
        """
        stack = super().compute_loss_context_manager()
        if self.ranks.size > 1:
            self._losses_begun += 1
            numbers = (self.args.seed, self.ranks.rank, self.state.global_step, self._losses_begun)
            stack.enter_context(random_numbers(numbers))
        return stack

    def _prepare_inputs(self, inputs: Any) -> Any:
        with algorithms(deterministic=False):  # GRPO generates here
            return cast(Any, super())._prepare_inputs(inputs)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = cast(Any, super())._get_grad_norm(*args, **kwargs)
        self.require_finite(
            "the norm of the gradient", float(norm), step=self.state.global_step + 1
        )
        return norm

    # Events.

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        # Events are the history; the log history of the Trainer would grow in every checkpoint.
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
        self._check_divergence()

    def _check_divergence(self) -> None:
        found = self._divergence.update(self.last_metrics)
        if found is None:
            return
        step = self.state.global_step
        self.job.emit("divergence", step=step, **found)
        if self.spec.on_divergence == "stop":
            raise JobFailed(
                f"step {step}: {found['metric']} is {found['value']:.4g}, more than three times "
                f"its median of {max(found['median'], 0):.4g}; the checkpoints are from before"
            )

    def _report_activity(self, activity: Activity | None) -> None:
        if activity is not None and activity.median_s is not None:
            activity = replace(activity, ends_job=self.spec.on_stall == "stop")
        self.job.working(activity)

    def begin_step(self) -> None:
        """Start the timers of a step. A process forked by user code ends here."""
        end_if_forked(self._owner, "to train a step")
        self._step_started = time.perf_counter()
        self._losses_begun = 0
        self.progress.begin("step")

    def step_seconds(self) -> float:
        """Return the duration of the current step so far."""
        return time.perf_counter() - self._step_started

    # The end of a step.

    def check_replicas(self, norm: float) -> None:
        """Raise JobFailed unless the weights have the same norm on every rank."""
        norms = self.ranks.gather(norm)
        if len(set(norms)) > 1:
            raise JobFailed(
                f"step {self.state.global_step}: the weights of the processes must be equal, got "
                f"norms {norms}"
            )

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.saver.settle()
        with self.progress.during("evaluation" if self.control.should_evaluate else "report"):
            cast(Any, super())._maybe_log_save_evaluate(*args, **kwargs)
        if self.job.pause.is_set() and self.state.global_step < self.state.max_steps:
            with self.progress.during(None):
                self._wait_while_paused()

    def _wait_while_paused(self) -> None:
        """Wait at the end of a step, with everything in memory, until continued or stopped."""
        step = self.state.global_step
        self.save_here()  # a pause may last long
        self.job.emit("paused", step=step)
        while self.job.pause.is_set() and not self.job.stop.is_set():
            time.sleep(0.1)
            self.saver.settle()
            if self.saver.waits:
                self.save_here()  # the save of an earlier step was in progress
        self.job.emit("unpaused", step=step)
        if self.job.stop.is_set():
            self.was_stopped = self.control.should_training_stop = True
            self.save_here()


class _StepEnd(TrainerCallback):
    """Checks the weights and the stop request between a step and its checkpoint."""

    def __init__(self, trainer: JobTrainer) -> None:
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.begin_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.saver.release_weights()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        norm = self.trainer.check_weights(trained_only=True)
        self.trainer.check_replicas(norm)
        if self.trainer.job.stop.is_set() or state.global_step == self.trainer.job.stop_at:
            self.trainer.was_stopped = True
            control.should_training_stop = True
        control.should_save = self.trainer.checkpoint_is_due()
