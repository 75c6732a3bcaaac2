"""The training loop of all kinds. Imports torch and transformers: only `run` of a kind imports it.

    for batch in task.batches(first_step):      # micro-batches of one step
        gradients of task.loss(micro_batch), summed over the processes of the job
        check, clip, optimizer step, learning-rate schedule
        step event, evaluation, checkpoint, pause, stop

A training resumes bit for bit: a checkpoint has everything that later steps depend on. NaN ends the
training before it reaches the weights.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import TrainerState, set_seed
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_utils import align_special_tokens
from transformers.utils.logging import disable_progress_bar

from ..context import Activity, Context, step_of
from ..data.trained_prompt import TrainedPrompt
from ..errors import JobFailed, Stopped
from ..models.pretrained import restore
from ..user_code.forks import end_if_forked
from .arguments import UNPLANNED
from .determinism import algorithms, random_numbers
from .finite import weight_norm
from .gradients import sum_gradients
from .health import Divergence, Progress
from .optimizer import clip, optimizer_of, planned_schedule_of, restart_schedule, schedule_of
from .options import TrainingSpec
from .provenance import environment
from .resuming import report_extension, report_options, warn_of_differences
from .saving import Content, Saver
from .snapshot import (
    Snapshot,
    TokenizerFiles,
    load_optimizer,
    read_job_state,
    require_files,
    restore_rng,
)
from .time_limit import TimeLimit
from .trackers import Trackers

M = TypeVar("M")

STEP_FIELDS = ("loss", "grad_norm", "learning_rate", "seconds")  # of every step event


class Loss(NamedTuple):
    """A part of the loss of a step, whose gradients are to be added to the weights."""

    value: Tensor  # of one element; without gradients it is only reported
    sums: Mapping[str, float] = {}  # metrics, added up over the parts and processes of a step
    amount: float | None = None  # in the reported loss; None: the value of `value`


class Task(Protocol[M]):
    """What a kind of training computes; the loop knows nothing else of a kind.

    M is the type of a micro-batch. Random numbers come from torch's CPU generator, whose state the
    loop saves and restores.
    """

    def batches(self, first_step: int) -> Iterator[Sequence[M]]:
        """Yield the micro-batches of each step, from `first_step` (0: the first) on, without end.

        Also called for a resumed training, whose steps get the batches of an uninterrupted one. The
        loop requests the batch of a step when the step begins, with the weights at its start.
        """

    def loss(self, micro_batch: M) -> Iterator[Loss]:
        """Yield the parts of the loss, which add up to the loss of a step over all micro-batches.

        The backward pass of a part runs before the loop requests the next part.
        """

    def fields(self, batch: Sequence[M], sums: Mapping[str, float]) -> dict[str, Any]:
        """Return the fields of a step's event beyond STEP_FIELDS."""

    def state(self) -> dict[str, Any]:
        """Return the state of a checkpoint that the task itself has: tensors and plain values."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned for a checkpoint."""


class Measured(Protocol):
    """What is measured of the model every `eval_every` steps and after the last one."""

    def measure(self) -> dict[str, Any] | None:
        """Measure the model; return the fields of an eval event, or None on a stop request."""

    def evaluated(self, found: dict[str, Any]) -> None:
        """Called with the fields of each eval event after the first step."""


class Training:
    """One execution of a training job: trains a model by a task, from a checkpoint to its end.

    `args`: transformers.TrainingArguments, or TRL's config of a kind; `max_steps` is the number of
    steps of the whole job, which the plans of a time limit replace. `eval_every`: 0 for an
    evaluation after the last step only, None for none; `eval_first`: also before the first step.
    Rank 0 alone evaluates and saves: the other ranks wait for it in the next step.

    `on_step` gets each step with its metrics before its event is emitted; `before_update` is called
    before each change of the weights. `differences_since`: how results differ from those of a
    version with these RULES. `about`: further entries of a checkpoint's manifest.
    """

    def __init__(
        self,
        *,
        ctx: Context,
        spec: TrainingSpec,
        args: Any,
        model: Any,
        tokenizer: Any,
        task: Task[Any],
        measured: Measured | None = None,
        eval_every: int | None = None,
        eval_first: bool = True,
        on_step: Callable[[int, Mapping[str, Any]], None] | None = None,
        before_update: Callable[[], None] | None = None,
        differences_since: Callable[[int], Sequence[str]] | None = None,
        about: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        set_seed(args.seed)
        self.ctx = ctx
        self.spec = spec
        self.args = args
        self.model = model
        self.tokenizer = tokenizer
        self.task = task
        self.step = 0  # steps done
        self.progress = Progress(self._report_activity)
        self.last_metrics: dict[str, Any] = {}  # the fields of the latest step event
        self.before: dict[str, Any] | None = None  # the evaluation before the first step
        self.last_eval: dict[str, Any] | None = None  # the fields of the latest eval event
        self._measured = measured
        self._eval_first = eval_first
        self._on_step = on_step
        self._before_update = before_update
        self._differences_since = differences_since
        self._about = about
        self._eval_every = eval_every if measured is not None and ctx.ranks.rank == 0 else None
        self._eval_step: int | None = None  # the step it measured, if in this execution
        self._eval_is_due = False
        self._was_stopped = False
        self._divergence = Divergence(spec.watched)
        self._owner = os.getpid()
        self._began = 0.0  # of the current step
        self._saver = Saver(ctx, spec, self._content)
        self._limit = self._time_limit(eval_every)
        self._files = TokenizerFiles(tokenizer, TrainedPrompt.of(spec.to_json()))
        self._optimizer: Any = None
        self._schedule: Any = None
        self.progress.begin("start")
        model.config.use_cache = args.use_cache
        disable_progress_bar()  # of writing weights: it would fill the job's log

    @property
    def steps_total(self) -> int | None:
        """The steps of the whole job; None: its time limit has not been planned yet."""
        return None if self.args.max_steps == UNPLANNED else int(self.args.max_steps)

    @property
    def planned(self) -> dict[str, Any]:
        """The field of a result that tells how a time limit was planned; none without one."""
        return {} if self._limit is None else {"plan": self._limit.result(self.step)}

    @property
    def _is_done(self) -> bool:
        """Whether the latest step was the last one."""
        return self.steps_total is not None and self.step >= self.steps_total

    def run(self, checkpoint: Path | None) -> None:
        """Train from a checkpoint, or from the start, to the last step.

        Raises Stopped after saving on a stop request, JobFailed on NaN.
        """
        if checkpoint is not None:
            require_files(checkpoint)
            report_options(self.ctx, self.spec, checkpoint)
            self._load_state(checkpoint)
            self._saver.latest = checkpoint
            if self.ctx.stop_at is not None and step_of(checkpoint) >= self.ctx.stop_at:
                if self.ctx.eval_at_stop:
                    restore(self.model, checkpoint)
                    self._evaluate_at_stop()
                raise Stopped(step_of(checkpoint))  # killed between that save and its end
            if self._is_done:
                restore(self.model, checkpoint)
                self._evaluate_if_due()
                return
        elif self._limit is not None:
            self._limit.begin(0, ())
            self._take_plan()
        evaluates = self._eval_first and self._measured is not None and self.ctx.ranks.rank == 0
        if checkpoint is None and evaluates:
            self.before = self._evaluate_before()
        os.environ.update(self.ctx.ranks.environment)
        try:
            options = self.spec.to_json()
            with Trackers(self.spec.report_to, self.ctx, options) as trackers:
                self._prepare(checkpoint)
                self._evaluate_if_due()
                self._train(checkpoint, trackers)
                self.progress.begin("end of the trackers' runs")
            self.progress.end()
        except Exception:
            # Whatever ended the training is raised again below. A save may be in progress: its
            # outcome is reported first. On a full disk the report itself may fail (OSError).
            with suppress(OSError):
                self._saver.report(patience_s=None)
            raise
        if self._was_stopped:
            if self.ctx.eval_at_stop and not self.ctx.stop.is_set():
                self._evaluate_at_stop()
            raise Stopped(self.step)
        self._evaluate_if_due()

    def save_model(self, folder: Path) -> None:
        """Write the trained model to `folder`, atomically."""
        self._saver.save_model(self.model, self._files, folder, self.step)

    # From the start, or from a checkpoint.

    def _prepare(self, checkpoint: Path | None) -> None:
        """Make the optimizer and the schedule; restore the state of a checkpoint."""
        if self.tokenizer is not None:
            align_special_tokens(self.model, self.tokenizer)
        if checkpoint is not None:
            restore(self.model, checkpoint)
        self._optimizer = optimizer_of(self.model, self.args)
        self._schedule = self._new_schedule()
        self.model.zero_grad()
        if checkpoint is None:
            return
        load_optimizer(self._optimizer, checkpoint)
        schedule = torch.load(checkpoint / SCHEDULER_NAME, weights_only=True)
        self._schedule.load_state_dict(schedule)
        restart_schedule(self._schedule, self.args.learning_rate)
        if self._limit is None:  # it reports its plans
            report_extension(
                self.ctx,
                checkpoint,
                steps_total=self.args.max_steps,
                learning_rate=self._schedule.get_last_lr()[0],
            )
        rules = self.ctx.checkpoints.about(checkpoint).get("rules", 0)
        fixes = () if self._differences_since is None else self._differences_since(rules)
        warn_of_differences(
            self.ctx,
            self.spec,
            checkpoint,
            self._environment(),
            self.args.device,
            fixes,
        )

    def _new_schedule(self) -> Any:
        if self._limit is not None:
            return planned_schedule_of(self._optimizer, self._limit.factor)
        return schedule_of(self._optimizer, self.args, self.args.max_steps)

    def _load_state(self, checkpoint: Path) -> None:
        state = read_job_state(checkpoint)
        self.step = step_of(checkpoint)
        is_cut = False  # whether the checkpoint is the last one by a later, shorter time limit
        if self._limit is not None:
            saved = state.get("plans", ())
            self._limit.begin(self.step, saved)
            self._take_plan()
            is_cut = self._is_done and len(self._limit.state(self.step)) > len(saved)
        self.last_metrics = state["metrics"]
        self._divergence.load_state(state["divergence"])
        # Earlier versions wrote none of these for GRPO. A job of theirs that had done its last step
        # is evaluated after it.
        self.before = state.get("before")
        self.last_eval = state.get("last_eval")
        is_due = state.get("eval_is_due", self._is_done) or is_cut
        self._eval_is_due = is_due and self._eval_every is not None
        self.task.load(state)

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint has beyond model, optimizer, schedule and random numbers."""
        return {
            **self.task.state(),
            "metrics": self.last_metrics,
            "divergence": self._divergence.state(),
            "before": self.before,
            "last_eval": self.last_eval,
            "eval_is_due": self._eval_is_due,
            **({} if self._limit is None else {"plans": self._limit.state(self.step)}),
        }

    def _environment(self) -> dict[str, Any]:
        return {**environment(self.args.device), "processes": self.ctx.ranks.size}

    # Steps.

    def _train(self, checkpoint: Path | None, trackers: Trackers) -> None:
        """Train to the last step, or to a stop."""
        if checkpoint is not None:
            restore_rng(checkpoint)
        batches = iter(self.task.batches(self.step))
        if self._limit is not None:
            self._limit.begin_steps()
        while True:
            self._begin_step()
            try:
                batch = next(batches)
            except Stopped:
                # The step, a long one, has changed no weight: a resume begins it again.
                self._was_stopped = True
                if self.step:
                    self._save()
                return
            loss, sums = self._learn(batch)
            if self.ctx.ranks.size > 1:
                sum_gradients(self.model.parameters(), self.ctx.ranks)
            norm = float(clip(self.model, self.args.max_grad_norm))
            self._require_finite("the norm of the gradient", norm)
            self._saver.release_weights()
            if self._before_update is not None:
                self._before_update()
            self._optimizer.step()
            rate = self._schedule.get_last_lr()[0]
            self._schedule.step()
            self.model.zero_grad()
            self.step += 1
            self.last_metrics = {
                "loss": loss,
                "grad_norm": norm,
                "learning_rate": rate,
                **self.task.fields(batch, sums),
                "seconds": time.perf_counter() - self._began,
            }
            self._end_step(trackers, sums)
            if self._is_done or self._was_stopped:
                return

    def _begin_step(self) -> None:
        """Start the clocks of a step. A process forked by user code ends here."""
        end_if_forked(self._owner, "to train a step")
        self.model.train()
        self._began = time.perf_counter()
        self.progress.begin("step")

    def _learn(self, batch: Sequence[Any]) -> tuple[float, dict[str, float]]:
        """Add the gradients of a step to the weights; return its loss and sums, of all ranks."""
        loss = torch.tensor(0.0)
        sums: dict[str, float] = {}
        for number, micro_batch in enumerate(batch, 1):
            with (
                algorithms(deterministic=self._is_deterministic),
                self._own_numbers(number),
                torch.enable_grad(),  # user code may have switched gradients off
            ):
                found = self._add_gradients(micro_batch)
            of_all = [_Learned(*of_rank) for of_rank in self.ctx.ranks.gather(found)]
            # Nothing to learn: AdamW treats a zero gradient differently from None.
            if not any(of_rank.has_gradient for of_rank in of_all):
                for weight in self.model.parameters():
                    if weight.requires_grad and weight.grad is None:
                        weight.grad = torch.zeros_like(weight)
            value = sum(of_rank.loss for of_rank in of_all)
            self._require_finite("the loss", value)
            loss += value  # in float32, like the loss of a model
            sums = _summed([sums, _summed([of_rank.sums for of_rank in of_all])])
        return float(loss), sums

    def _add_gradients(self, micro_batch: Any) -> _Learned:
        """Add the gradients of a micro-batch; return the sums over its parts on this rank."""
        found = _Learned(False, 0.0, {})
        for part in self.task.loss(micro_batch):
            if part.value.requires_grad:
                torch.autograd.backward(part.value)
            amount = float(part.value.detach()) if part.amount is None else part.amount
            found = _Learned(
                found.has_gradient or part.value.requires_grad,
                found.loss + amount,
                _summed([found.sums, part.sums]),
            )
        return found

    def _own_numbers(self, number: int) -> AbstractContextManager[None]:
        """Draw random numbers of this rank, seeded by (seed, rank, step, micro-batch).

        All other random numbers of a step are the same on every rank, and so in a checkpoint.
        """
        ranks = self.ctx.ranks
        if ranks.size == 1:
            return nullcontext()
        return random_numbers((self.args.seed, ranks.rank, self.step, number))

    def _end_step(self, trackers: Trackers, sums: Mapping[str, float]) -> None:
        """Check the weights; report, evaluate, save and pause, whatever is due after this step."""
        norm = weight_norm(self.model, self.step, trained_only=True)
        self._check_replicas(norm)
        if self._limit is not None:
            self._limit.end_step(self.step)
            self._take_plan()
        is_last = self._is_done
        self._was_stopped = self.ctx.stop.is_set() or self.step == self.ctx.stop_at
        every = self._eval_every
        evaluates = every is not None and (is_last or bool(every and self.step % every == 0))
        saves = self._saver.is_due(self.step) or (self.ctx.ranks.rank == 0 and is_last)
        self._saver.settle()
        with self.progress.during("evaluation" if evaluates else "report"):
            self._report(trackers, sums)
            if evaluates:
                self._evaluate()
            if saves or (self._was_stopped and self.ctx.ranks.rank == 0):
                self._save()
        if self.ctx.pause.is_set() and not is_last:
            with self.progress.during(None), self._outside_the_limit():
                self._wait_while_paused()

    def _report(self, trackers: Trackers, sums: Mapping[str, float]) -> None:
        """Emit the step's event; check its metrics for a divergence."""
        metrics = self.last_metrics
        if self._on_step is not None:
            self._on_step(self.step, metrics)
        self.ctx.emit("step", step=self.step, steps_total=self.steps_total, **metrics)
        trackers.log(self.step, {**sums, **metrics})
        found = self._divergence.update(metrics)
        if found is None:
            return
        self.ctx.emit("divergence", step=self.step, **found)
        if self.spec.on_divergence == "stop":
            raise JobFailed(
                f"step {self.step}: {found['metric']} is {found['value']:.4g}, more than three "
                f"times its median of {max(found['median'], 0):.4g}; the checkpoints are from "
                "before"
            )

    def _save(self) -> None:
        self._saver.save(self.step, is_last=self._is_done, is_stopped=self._was_stopped)

    def _wait_while_paused(self) -> None:
        """Wait at the end of a step, with everything in memory, until continued or stopped."""
        self._save()  # a pause may last long
        self.ctx.emit("paused", step=self.step)
        while self.ctx.pause.is_set() and not self.ctx.stop.is_set():
            time.sleep(0.1)
            self._saver.settle()
            if self._saver.waits:
                self._save()  # the save of an earlier step was in progress
        self.ctx.emit("unpaused", step=self.step)
        if self.ctx.stop.is_set():
            self._was_stopped = True
            self._save()

    # Evaluations.

    def _evaluate_before(self) -> dict[str, Any]:
        """Evaluate the initial weights and return the fields of the event.

        Raises Stopped on a stop request, JobFailed for weights that are not finite.
        """
        weight_norm(self.model, self.step)
        found = self._measure()
        if found is None:
            raise Stopped(0)
        self.ctx.emit("eval", step=0, phase="before", **found)
        return found

    def _evaluate(self) -> None:
        """Evaluate after this step and emit the event; a stop request defers it.

        The checkpoint records that it is due, and the resumed job runs it before its next step.
        """
        assert self._measured is not None
        self._eval_is_due = True
        found = self._measure()
        if found is None:
            self._was_stopped = True
            return
        self._eval_is_due = False
        self.last_eval, self._eval_step = found, self.step
        phase = "after" if self._is_done else "during"
        self.ctx.emit("eval", step=self.step, phase=phase, **found)
        self._measured.evaluated(found)

    def _evaluate_if_due(self) -> None:
        """Run the evaluation that a stop has deferred. Raises Stopped."""
        if self._eval_is_due:
            self._evaluate()
            if self._was_stopped:
                raise Stopped(self.step)

    def _evaluate_at_stop(self) -> None:
        """Evaluate at the requested stop step; its checkpoint is on disk already."""
        is_due = self._eval_every is not None and self._eval_step != self.step
        if is_due and (found := self._measure()) is not None:
            self.ctx.emit("eval", step=self.step, phase="during", **found)

    def _measure(self) -> dict[str, Any] | None:
        """Measure in the precision of the training."""
        assert self._measured is not None
        timed = nullcontext() if self._limit is None else self._limit.evaluation()
        with timed, torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16):
            return self._measured.measure()

    # Checkpoints.

    def _content(self) -> Content:
        return Content(
            step=self.step,
            snapshot=Snapshot.take(
                model=self.model,
                tokenizer=self._files,
                optimizer=self._optimizer,
                scheduler=self._schedule,
                job=self._state(),
                trainer=self._trainer_state(),
            ),
            metrics=self._metrics(),
            about={**self._environment(), **({} if self._about is None else self._about())},
        )

    def _metrics(self) -> dict[str, Any]:
        """Return the metrics of the step, and those of an evaluation after it, if there was one.

        An evaluation metric gets the prefix `eval_` if a step metric has the same name. Intervals
        are in the event of the evaluation only.
        """
        of_step = self.last_metrics
        found = (self.last_eval or {}) if self._eval_step == self.step else {}
        names = [name for name in found if name != "intervals"]
        return {**of_step, **{f"eval_{n}" if n in of_step else n: found[n] for n in names}}

    def _trainer_state(self) -> TrainerState:
        """Return the state with which a plain Trainer of transformers continues."""
        return TrainerState(
            global_step=self.step,
            max_steps=self.args.max_steps,
            train_batch_size=self.args.train_batch_size,
            logging_steps=1,
        )

    # A time limit.

    def _time_limit(self, eval_every: int | None) -> TimeLimit | None:
        limit_s = self.spec.time_limit_s
        if limit_s is None:
            return None
        self.args.max_steps = UNPLANNED
        return TimeLimit(
            self.ctx,
            self.spec,
            limit_s,
            eval_every=None if self._measured is None else eval_every,
            save_s=lambda: self._saver.seconds,
        )

    def _take_plan(self) -> None:
        """Follow the plan that holds after the latest step."""
        assert self._limit is not None
        steps = self._limit.steps_at(self.step)
        self.args.max_steps = UNPLANNED if steps is None else steps

    def _outside_the_limit(self) -> AbstractContextManager[None]:
        return nullcontext() if self._limit is None else self._limit.paused()

    # NaN and Inf, checked before they reach the weights.

    @property
    def _is_deterministic(self) -> bool:
        """Whether deterministic kernels must be requested: on a CPU all kernels are."""
        return self.spec.deterministic and self.args.device.type != "cpu"

    def _require_finite(self, what: str, value: float) -> None:
        """Raise JobFailed when a value of the current step is NaN or Inf."""
        if not math.isfinite(value):
            weight_norm(self.model, self.step)
            raise JobFailed(f"step {self.step + 1}: {what} is {value}")

    def _check_replicas(self, norm: float) -> None:
        """Raise JobFailed unless the weights have the same norm on every rank."""
        norms = self.ctx.ranks.gather(norm)
        if len(set(norms)) > 1:
            raise JobFailed(
                f"step {self.step}: the weights of the processes must be equal, got norms {norms}"
            )

    def _report_activity(self, activity: Activity | None) -> None:
        if activity is not None and activity.median_s is not None:
            activity = replace(activity, ends_job=self.spec.on_stall == "stop")
        self.ctx.working(activity)


class _Learned(NamedTuple):
    """What a rank has computed of a micro-batch. Metrics are apart: their names may be anything."""

    has_gradient: bool  # whether any part of the loss has
    loss: float
    sums: Mapping[str, float]


def _summed(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of each number, over those that have it, in their order."""
    sums: dict[str, float] = {}
    for one in found:
        for name, value in one.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums
