"""A Trainer with atomic checkpoints, written concurrently with training, and exact resume.

Imports torch and transformers: only `run` of a kind imports it.
"""

from __future__ import annotations

import errno
import math
import os
import time
from pathlib import Path
from typing import Any, cast

import orjson
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils.logging import disable_progress_bar

from ..context import RULES, Context, Save, step_of
from ..errors import JobFailed
from ..files.atomic import whole_folder
from ..models.weight_headers import listed
from ..spec import shown
from .live_tensors import LiveTensors
from .options import TrainingSpec
from .provenance import differences, environment
from .snapshot import (
    Snapshot,
    TokenizerFiles,
    link_model,
    read_job_state,
    require_files,
    write_model,
)

PATIENCE_S = 1.0  # how long a step waits for a save that is in flight when the next is due


class CheckpointingTrainer(Trainer):
    """The saving and resuming part of JobTrainer.

    Its `args` have `save_strategy="no"`: `spec` decides when to save.
    """

    def __init__(self, *args: Any, job: Context, spec: TrainingSpec, **kwargs: Any) -> None:
        self.job = job
        self.ranks = job.ranks
        self.spec = spec
        self.was_stopped = False
        self._in_flight: Save | None = None
        self._save_was_due = False  # while another was in flight
        self._must_wait = False  # whether training waits for the next save to succeed
        self._saved = time.monotonic()  # when the latest save began
        self._checkpoint: Path | None = None  # the latest
        self._live: LiveTensors | None = None  # of the save in flight
        self._lacked_space = False  # whether the latest save failed on a full disk
        self._has_warned = False  # whether a checkpoint lacked the metric of keep_best
        self._blocked_s = 0.0  # how long training was blocked by the save in flight
        cast(Any, disable_progress_bar)()  # of writing weights: it would fill the job's log
        super().__init__(*args, **kwargs)
        self._tokenizer_files = TokenizerFiles(self.processing_class)

    @property
    def is_deterministic(self) -> bool:
        """Whether deterministic kernels must be requested: on a CPU all kernels are."""
        return self.spec.deterministic and self.args.device.type != "cpu"

    # Hooks for a kind.

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of this step, by the names of event fields."""
        return {}

    def job_state(self) -> dict[str, Any]:
        """Return the state of a checkpoint beyond the Trainer's own: tensors and plain values."""
        return {}

    def load_job_state(self, state: dict[str, Any]) -> None:
        """Restore what `job_state` returned for a checkpoint."""

    def about(self) -> dict[str, Any]:
        """Return entries of the manifest in addition to metrics, options and environment."""
        return {}

    def changes_since(self, rules: int) -> list[str]:
        """Return how results of this version differ from those of a version with these RULES."""
        return []

    # Saving.

    def checkpoint_is_due(self) -> bool:
        """Whether to save at the end of the current step; rank 0 saves for all."""
        if self.ranks.rank > 0:
            return False
        interval = self.spec.save_interval
        return (
            self.was_stopped
            or self._save_was_due
            or self.state.global_step >= self.state.max_steps
            or (interval.steps is not None and self.state.global_step % interval.steps == 0)
            or (interval.seconds is not None and time.monotonic() - self._saved >= interval.seconds)
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.save_here()

    def save_here(self) -> None:
        """Start a save of this step; at the end of training, wait until it is durable."""
        must_be_now = self.was_stopped or self.state.global_step >= self.state.max_steps
        self.settle_save(patience_s=None if must_be_now else PATIENCE_S)
        if self._in_flight is not None:
            # The disk is slower than the interval. Two concurrent saves would slow each other down:
            # this one starts at the first step that finds the earlier one done.
            self._save_was_due = self._in_flight.step != self.state.global_step
        elif not self._is_saved():
            self._begin_save()
        if self._must_wait and not self.was_stopped:
            self.job.patiently(self._save_now, self.job.run_dir)
            self._must_wait = False
            self.settle_save(patience_s=None)
        if self.was_stopped:
            self.settle_save(patience_s=None)

    def _save_now(self) -> None:
        """Complete a save of this step. Raises OSError if the disk is full."""
        if self._in_flight is None:
            self._begin_save()
        saved = cast(Save, self._in_flight).outcome(patience_s=None)
        if saved is not None and saved.lacked_space:
            self._in_flight = None
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(saved.path))

    def _is_saved(self) -> bool:
        """Whether the latest checkpoint is of this step."""
        return self._checkpoint is not None and step_of(self._checkpoint) == self.state.global_step

    def _begin_save(self) -> None:
        began = time.perf_counter()
        snapshot = Snapshot.take(
            model=self.model,
            tokenizer=self._tokenizer_files,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            job=self.job_state(),
            trainer=self.state,
        )
        metrics = _numbers(self.metrics())
        self._warn_if_metric_missing(metrics)
        about = {
            "metrics": metrics,
            "options": self.spec.to_json(),
            "rules": RULES,
            **self.about(),
            **self._environment(),
        }
        self._live = snapshot.live
        step = self.state.global_step
        self._in_flight = self.job.checkpoints.save(step, snapshot.prepare, about=about)
        self._save_was_due = False
        self._saved = time.monotonic()
        self._blocked_s = time.perf_counter() - began

    def _warn_if_metric_missing(self, metrics: dict[str, float]) -> None:
        """Warn once that a checkpoint lacks the metric of keep_best and cannot be the best."""
        name = self.spec.keep_best
        if name is None or name in metrics or self._has_warned:
            return
        self._has_warned = True
        step = self.state.global_step
        self.job.emit(
            "warning",
            step=step,
            message=f"keep_best: step {step} has no {name} to judge its checkpoint by, but "
            f"{', '.join(sorted(metrics))}",
        )

    def release_weights(self) -> None:
        """Wait until the optimizer may change the tensors of the save in progress."""
        if self._live is not None:
            began = time.perf_counter()
            # A finished save needs no copies, even if it failed before it read anything.
            if self._in_flight is not None and self._in_flight.outcome() is None:
                self._live.release()
            self._live = None
            self._blocked_s += time.perf_counter() - began

    def settle_save(self, *, patience_s: float | None = 0) -> None:
        """Report the save in progress if it ends within `patience_s` (None: wait for it).

        Raises JobFailed when it failed and `on_save_error` is stop. On a full disk the next step
        is saved instead, and training waits for that save to succeed.
        """
        failed = self.report_save(patience_s=patience_s)
        if failed is None or self.spec.on_save_error != "stop":
            return
        if not self._lacked_space:
            raise JobFailed(failed)
        self._save_was_due = self._must_wait = True

    def report_save(self, *, patience_s: float | None) -> str | None:
        """As `settle_save`, but return the error message of a failed save; otherwise None."""
        if self._in_flight is None:
            return None
        began = time.perf_counter()
        saved = self._in_flight.outcome(patience_s=patience_s)
        if saved is None:
            return None
        step, self._in_flight = self._in_flight.step, None
        self._lacked_space = saved.lacked_space
        self._blocked_s += time.perf_counter() - began
        if saved.error is not None:
            self.job.emit("save_failed", step=step, error=saved.error, seconds=saved.seconds)
            return f"step {step}: no checkpoint could be written: {saved.error}"
        self._checkpoint = saved.path
        self.job.emit(
            "checkpoint",
            step=step,
            path=saved.path.name,
            bytes=saved.size_bytes,
            seconds=saved.seconds,
            blocked_s=self._blocked_s,
        )
        return None

    def save_final_model(self, folder: Path) -> None:
        """Write the trained model to `folder`, atomically; hard links to the last checkpoint."""
        if self.ranks.rank > 0:
            return
        self.settle_save(patience_s=None)

        def write() -> None:
            with whole_folder(folder) as staging:
                if not (self._is_saved() and link_model(cast(Path, self._checkpoint), staging)):
                    write_model(self.model, staging)
                    self._tokenizer_files.write(staging)

        self.job.patiently(write, folder)

    # Resuming.

    def check_checkpoint(self, checkpoint: Path) -> None:
        """Check a checkpoint before resuming from it. Raises JobFailed and SpecError."""
        require_files(checkpoint)
        self._compare_options(checkpoint)
        self._checkpoint = checkpoint

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        self._set_learning_rate()
        self._report_extension(Path(checkpoint))
        self.load_job_state(read_job_state(Path(checkpoint)))
        self._warn_of_differences(Path(checkpoint))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raise JobFailed if a checkpoint has other tensors than the model; the Trainer logs it."""
        model = cast(nn.Module, self.model)
        tensors = model.state_dict(keep_vars=True)
        missing, unexpected = set(load_result.missing_keys), load_result.unexpected_keys
        loaded = {id(tensor) for name, tensor in tensors.items() if name not in missing}
        missing = {name for name in missing if id(tensors[name]) not in loaded}  # those not tied
        if missing or unexpected:
            raise JobFailed(
                f"model: must have the tensors of the checkpoint: {len(missing)} of "
                f"{len(tensors)} tensors are missing in it ({listed(missing) or 'none'}), "
                f"{len(unexpected)} unexpected ({listed(unexpected) or 'none'})"
            )

    def _compare_options(self, checkpoint: Path) -> None:
        """Report options changed since a checkpoint. Raises SpecError for a forbidden change."""
        changes = self.spec.changes(self.job.checkpoints.about(checkpoint).get("options", {}))
        if changes:
            texts = [f"{n} {shown(now)} (was {shown(then)})" for n, (then, now) in changes.items()]
            self.job.emit("revised", changes=changes, message=", ".join(texts))

    def _report_extension(self, checkpoint: Path) -> None:
        before = orjson.loads((checkpoint / TRAINER_STATE_NAME).read_bytes())["max_steps"]
        if before < self.args.max_steps:
            self.job.emit(
                "extended",
                steps_before=before,
                steps_total=self.args.max_steps,
                learning_rate_before=self.job.checkpoints.about(checkpoint)["metrics"].get(
                    "learning_rate"
                ),
                learning_rate=self._get_learning_rate(),  # of the next step
            )

    def _warn_of_differences(self, checkpoint: Path) -> None:
        about = self.job.checkpoints.about(checkpoint)
        changed = differences(about, self._environment())
        if self.args.device.type != "cpu" and not self.spec.deterministic:
            changed.append("deterministic is off")
        if changed:
            self.job.emit(
                "warning",
                message=f"the resume from {checkpoint.name} is exact in state, but not bitwise "
                f"({'; '.join(changed)}): sums round differently from here on",
            )
        fixes = self.changes_since(about.get("rules", 0))
        if fixes:
            self.job.emit(
                "warning",
                message=f"from step {step_of(checkpoint) + 1} on, results differ from those of the "
                f"earlier version that wrote {checkpoint.name}: {'; '.join(fixes)}",
            )

    def _environment(self) -> dict[str, Any]:
        return {**environment(self.args.device), "processes": self.ranks.size}

    def _set_learning_rate(self) -> None:
        # The optimizer state holds the learning rate of the old schedule (0.0 at the end of a
        # linear one). Recompute it, so that changed steps and a changed base rate apply.
        schedule = cast(LambdaLR, self.lr_scheduler)
        schedule.base_lrs = [self.args.learning_rate for _ in schedule.base_lrs]
        rates = [
            base * factor(schedule.last_epoch)
            for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        schedule._last_lr = rates
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
            group["lr"], group["initial_lr"] = rate, self.args.learning_rate


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
