"""A Trainer with atomic checkpoints, written concurrently with training, and exact resume.

Of GRPO only: the other kinds train in `loop`. Imports torch and transformers: only `run` of a kind
imports it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer
from transformers.utils.logging import disable_progress_bar

from ..context import Context
from ..models.pretrained import check_restored
from .optimizer import restart_schedule
from .options import TrainingSpec
from .provenance import environment
from .resuming import report_extension, report_options, warn_of_differences
from .saving import Content, Saver
from .snapshot import Snapshot, TokenizerFiles, read_job_state, require_files


class CheckpointingTrainer(Trainer):
    """The saving and resuming part of JobTrainer.

    Its `args` have `save_strategy="no"`: `spec` decides when to save.
    """

    def __init__(self, *args: Any, job: Context, spec: TrainingSpec, **kwargs: Any) -> None:
        self.job = job
        self.ranks = job.ranks
        self.spec = spec
        self.was_stopped = False
        self.saver = Saver(job, spec, self._content)
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

    @property
    def _is_last(self) -> bool:
        return self.state.global_step >= self.state.max_steps

    def checkpoint_is_due(self) -> bool:
        """Whether to save at the end of the current step; rank 0 saves for all."""
        is_end = self.was_stopped or self._is_last
        return self.ranks.rank == 0 and (is_end or self.saver.is_due(self.state.global_step))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.save_here()

    def save_here(self) -> None:
        """Start a save of this step; at the end of training, wait until it is durable."""
        step = self.state.global_step
        self.saver.save(step, is_last=self._is_last, is_stopped=self.was_stopped)

    def _content(self) -> Content:
        return Content(
            step=self.state.global_step,
            snapshot=Snapshot.take(
                model=self.model,
                tokenizer=self._tokenizer_files,
                optimizer=self.optimizer,
                scheduler=self.lr_scheduler,
                job=self.job_state(),
                trainer=self.state,
            ),
            metrics=self.metrics(),
            about={**self.about(), **self._environment()},
        )

    def save_final_model(self, folder: Path) -> None:
        """Write the trained model to `folder`, atomically."""
        self.saver.save_model(self.model, self._tokenizer_files, folder, self.state.global_step)

    # Resuming.

    def check_checkpoint(self, checkpoint: Path) -> None:
        """Check a checkpoint before resuming from it. Raises JobFailed and SpecError."""
        require_files(checkpoint)
        report_options(self.job, self.spec, checkpoint)
        self.saver.latest = checkpoint

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        check_restored(self.model, load_result)  # the Trainer only logs it

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        restart_schedule(cast(LambdaLR, self.lr_scheduler), self.args.learning_rate)
        report_extension(
            self.job,
            Path(checkpoint),
            steps_total=self.args.max_steps,
            learning_rate=self._get_learning_rate(),
        )
        self.load_job_state(read_job_state(Path(checkpoint)))
        self._warn_of_differences(Path(checkpoint))

    def _warn_of_differences(self, checkpoint: Path) -> None:
        warn_of_differences(
            self.job,
            self.spec,
            checkpoint,
            self._environment(),
            self.args.device,
            self.changes_since(self.job.checkpoints.about(checkpoint).get("rules", 0)),
        )

    def _environment(self) -> dict[str, Any]:
        return {**environment(self.args.device), "processes": self.ranks.size}
