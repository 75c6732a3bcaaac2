"""Trainer with evaluations: every N steps and after the last one, deferred by a stop.

Imports torch and transformers: only `run` of a kind imports it.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..errors import Stopped
from .trainer import JobTrainer


class EvaluatingTrainer(JobTrainer):
    """A JobTrainer that measures its model every `eval_every` steps and after the last one.

    `eval_every`: 0 for the last step only, None for no evaluation. Rank 0 alone evaluates: the
    other ranks wait for it in the next step. A stop request during an
    evaluation defers it: the checkpoint records that it is due, and the resumed job runs it before
    its next step.
    """

    def __init__(self, *args: Any, eval_every: int | None, **kwargs: Any) -> None:
        self.eval_every = eval_every if kwargs["job"].ranks.rank == 0 else None
        self.last_eval: dict[str, Any] | None = None  # the fields of the latest eval event
        self._eval_step: int | None = None  # the step it measured, if in this execution
        self._eval_is_due = False
        super().__init__(*args, **kwargs)
        self.add_callback(_EvalSchedule(self))

    @abstractmethod
    def measure(self) -> dict[str, Any] | None:
        """Measure the model; return the fields of an eval event, or None on a stop request."""

    def evaluated(self, found: dict[str, Any]) -> None:
        """Called with the fields of each eval event after the first step."""

    def evaluate_before(self) -> dict[str, Any]:
        """Evaluate the initial weights and return the fields of the event.

        Raises Stopped on a stop request.
        """
        found = self._measured()
        if found is None:
            raise Stopped(0)
        self.job.emit("eval", step=0, phase="before", **found)
        return found

    def evaluate_at_stop(self) -> None:
        is_due = self.eval_every is not None and self._eval_step != self.state.global_step
        if is_due and (found := self._measured()) is not None:
            self.job.emit("eval", step=self.state.global_step, phase="during", **found)

    def _measured(self) -> dict[str, Any] | None:
        """Measure in the precision of the training, also before the Trainer prepares the model."""
        with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16):
            return self.measure()

    def train_to_end(self, checkpoint: Path | None) -> None:
        super().train_to_end(checkpoint)
        self.evaluate_if_due()

    def evaluate_if_due(self) -> None:
        """Run the evaluation that a stop has deferred. Raises Stopped."""
        if self._eval_is_due:
            self._evaluate()
            if self.was_stopped:
                raise Stopped(self.state.global_step)

    def evaluate_after(self) -> dict[str, Any]:
        """Return the evaluation after the last step; run it unless it exists.

        Raises Stopped.
        """
        if self.last_eval is None:
            self._eval_is_due = True
            self.evaluate_if_due()
        assert self.last_eval is not None
        return self.last_eval

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate at this step and emit the event; deferred when the job is to stop."""
        self._eval_is_due = True
        self.control.should_evaluate = False  # otherwise the end of training requests it again
        found = self._measured()
        if found is None:
            self.was_stopped = True
            self.control.should_save = self.control.should_training_stop = True
            return
        self._eval_is_due = False
        self.last_eval, self._eval_step = found, self.state.global_step
        is_last = self.state.global_step >= self.args.max_steps
        self.job.emit(
            "eval", step=self.state.global_step, phase="after" if is_last else "during", **found
        )
        self.evaluated(found)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the step, and those of an evaluation after it, if there was one.

        An evaluation metric gets the prefix `eval_` if a step metric has the same name. Intervals
        are in the event of the evaluation only.
        """
        of_step = super().metrics()
        found = (self.last_eval or {}) if self._eval_step == self.state.global_step else {}
        names = [name for name in found if name != "intervals"]
        return {**of_step, **{f"eval_{n}" if n in of_step else n: found[n] for n in names}}

    def job_state(self) -> dict[str, Any]:
        return {
            **super().job_state(),
            "last_eval": self.last_eval,
            "eval_is_due": self._eval_is_due,
        }

    def load_job_state(self, state: dict[str, Any]) -> None:
        super().load_job_state(state)
        # GRPO checkpoints of earlier versions have neither.
        self.last_eval = state.get("last_eval")
        self._eval_is_due = state.get("eval_is_due", False)


class _EvalSchedule(TrainerCallback):
    """Requests an evaluation at the end of a step that has one."""

    def __init__(self, trainer: EvaluatingTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.evaluate_if_due()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        every = self.trainer.eval_every
        if every is not None:
            is_last = state.global_step >= args.max_steps
            control.should_evaluate = is_last or bool(every and state.global_step % every == 0)
