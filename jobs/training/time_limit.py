"""The time limit of a training: measures its steps, and decides and records how many there are.

A decision is a `Plan` in plan.json of the run directory. It is on the disk before a step follows
it, and a checkpoint has the plans up to its step. A resumed training repeats the steps since its
checkpoint by the recorded plans, and makes none at a step that an earlier execution has done: its
last step and its weights are those of an uninterrupted training with the same plans.

Running time counts over all executions, without pauses and waits for a full disk. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson

from ..context import Context
from ..errors import JobFailed
from ..files.atomic import write_atomic
from .options import MOST_STEPS, TrainingSpec
from .time_plan import DECAYS, Plan, Times, next_share, plan_after, plan_at, rate

FILE = "plan.json"
SCHEMA = 1

# The first plan needs as many rounds of steps, or fewer when this share of the limit has passed.
FIRST_ROUNDS = 4
FIRST_SHARE = 0.05
# How much longer than planned steps may take after the last plan, as a share of the time limit;
# beyond it the training ends early.
MOST_EXCESS = 0.1


class TimeLimit:
    """The plans of one execution of a training.

    A round is the number of steps after which their work repeats: GRPO generates once per
    `num_iterations` steps. The first round of an execution is not measured: it compiles and fills
    caches. `save_s` returns the time of the latest checkpoint, None before the first one.
    `eval_every`: as for Training; None if no evaluation follows the last step.
    """

    def __init__(
        self,
        ctx: Context,
        spec: TrainingSpec,
        limit_s: float,
        *,
        eval_every: int | None,
        save_s: Callable[[], float | None],
    ) -> None:
        self.plans: list[Plan] = []
        self._ctx = ctx
        self._spec = spec
        self._limit_s = limit_s
        self._eval_every = eval_every
        self._save_s = save_s
        self._decay = DECAYS[spec.lr_scheduler]
        self._warmup = spec.warmup_for(MOST_STEPS)
        self._round = spec.steps_per_round
        self._stopwatch = Stopwatch(ctx)
        self._window: tuple[int, float] | None = None  # step and time at which measuring began
        self._latest = (0.0, 0.0)  # end and duration of the latest step
        self._evaluation_s: float | None = None

    # Reading.

    def steps_at(self, step: int) -> int | None:
        """Return the steps of the whole job as planned after `step`; None before the first plan."""
        plan = plan_at(self.plans, step)
        return None if plan is None else plan.steps

    def factor(self, step: int) -> float:
        """Return the learning rate of the step after `step`, as a share of the full one."""
        return rate(self.plans, self._decay, self._warmup, step)

    def result(self, step: int) -> dict[str, Any]:
        """Return what the result of the job tells about its plan."""
        plan = plan_at(self.plans, step)
        running_s = self._stopwatch.running_s
        found = {"limit_s": self._limit_s, "running_s": running_s, "plans": len(self.plans)}
        return found if plan is None else {**found, "steps": plan.steps, "step_s": plan.step_s}

    def state(self, step: int) -> list[dict[str, Any]]:
        """Return the plans up to a step, for its checkpoint."""
        return [asdict(plan) for plan in self.plans if plan.after <= step]

    # From the start, or from a checkpoint.

    def begin(self, step: int, saved: Sequence[Mapping[str, Any]]) -> None:
        """Read the recorded plans. `saved`: those in the checkpoint of `step`.

        With another time limit than that of these plans, those after the checkpoint are dropped,
        and the rest of the training is planned again.
        """
        of_checkpoint = [Plan(**plan) for plan in saved]
        recorded = [Plan(**plan) for plan in self._ctx.ranks.from_first(self._read)]
        # The file of an earlier copy of the run directory may lack plans that the checkpoint has.
        agrees = recorded[: len(of_checkpoint)] == of_checkpoint
        self.plans = recorded if agrees else of_checkpoint
        if not self.plans:
            return
        if self.plans[-1].limit_s != self._limit_s:
            self.plans = [plan for plan in self.plans if plan.after <= step]
            if self.plans:
                self._add(self._ctx.ranks.from_first(lambda: self._revise(step)))
        if (plan := plan_at(self.plans, step)) is not None:
            self._evaluation_s = plan.evaluation_s
            self._emit(plan, step)

    # Steps.

    def begin_steps(self) -> None:
        """Start the clock of the first step of this execution."""
        self._latest = (self._stopwatch.trained_s, 0.0)

    def end_step(self, step: int) -> None:
        """Measure a step that has ended; make a plan, or apply a recorded one, if it is due."""
        self._measure(step)
        plan = next((plan for plan in self.plans if plan.after == step), None)
        if plan is None:
            made = self._ctx.ranks.from_first(lambda: self._decide(step))
            if made is None:
                return
            self._add(made)
            plan = self.plans[-1]
        self._window = None if self._window is None else (step, self._stopwatch.trained_s)
        self._emit(plan, step)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Measure an evaluation, which is no part of a step."""
        with self._stopwatch.evaluation() as taken:
            yield
        self._evaluation_s = taken[0]

    def paused(self) -> AbstractContextManager[None]:
        """Return a context manager for a pause, which is no part of the running time."""
        return self._stopwatch.paused()

    def _measure(self, step: int) -> None:
        now = self._stopwatch.trained_s
        self._latest = (now, now - self._latest[0])
        if self._window is None and step % self._round == 0:
            self._window = (step, now)

    def _measured(self, step: int) -> tuple[int, float]:
        """Return the rounds of steps that were measured, and the mean time of a step."""
        if self._window is None or step == self._window[0]:
            return 0, 0.0
        steps = step - self._window[0]
        return steps // self._round, (self._latest[0] - self._window[1]) / steps

    def _decide(self, step: int) -> dict[str, Any] | None:
        """Return the plan to make after this step, None for none; record it."""
        last = self.plans[-1] if self.plans else None
        if step <= self._ctx.latest_step or (last is not None and last.after > step):
            return None  # an earlier execution has done this step, and made its plans
        if last is not None and step >= last.steps:
            return None  # it was the last step: the learning rate has come to its end
        rounds, step_s = self._measured(step)
        if not rounds:
            step_s = self._latest[1] if last is None else last.step_s
        plan = self._plan(step, step_s)
        if last is not None and last.is_last:
            if not self._takes_too_long(step, last):
                return None
            plan = replace(plan, steps=step)
        elif not self._is_due(step, rounds, plan):
            return None
        return self._record(plan)

    def _is_due(self, step: int, rounds: int, plan: Plan) -> bool:
        """Whether to make this plan, from so many measured rounds."""
        last = self.plans[-1] if self.plans else None
        if rounds == 0 and last is None:
            # One step, the first, is no measure of the others: only the end of the time counts.
            return plan.running_s >= self._limit_s
        if plan.steps == step:  # no other step fits
            return True
        if rounds == 0 or step % self._round:
            return False
        share = plan.running_s / self._limit_s
        if last is None:
            return rounds >= FIRST_ROUNDS or share >= FIRST_SHARE
        following = next_share(last)
        return following is not None and share >= following

    def _revise(self, step: int) -> dict[str, Any]:
        """Make a plan for another time limit, with the measured times of the last plan."""
        last = self.plans[-1]
        self._evaluation_s = last.evaluation_s
        return self._record(self._plan(step, last.step_s, is_revised=True))

    def _takes_too_long(self, step: int, last: Plan) -> bool:
        """Whether the steps since the last plan exceed their planned time by far.

        Only the time of steps in this execution counts: a kill costs time, never steps.
        """
        if self._window is None:
            return False
        steps, seconds = step - self._window[0], self._latest[0] - self._window[1]
        return seconds - steps * last.step_s > MOST_EXCESS * self._limit_s

    def _times(self, step_s: float) -> Times:
        has_evaluation = self._eval_every is not None
        save_s = self._save_s()
        if save_s is None and self.plans:  # none in this execution yet
            save_s = self.plans[-1].save_s
        return Times(
            limit_s=self._limit_s,
            running_s=self._stopwatch.running_s,
            step_s=step_s,
            evaluation_s=self._evaluation_s if has_evaluation else None,
            save_s=save_s,
            eval_every=self._eval_every or 0,
        )

    def _plan(self, step: int, step_s: float, *, is_revised: bool = False) -> Plan:
        return plan_after(
            step,
            self._times(step_s),
            self.plans,
            most=MOST_STEPS,
            decay=self._decay,
            warmup=self._warmup,
            warmup_of=self._spec.warmup_for,
            is_revised=is_revised,
        )

    # Recording.

    def _add(self, plan: Mapping[str, Any]) -> None:
        self.plans.append(Plan(**plan))

    @property
    def _path(self) -> Path:
        return self._ctx.run_dir / FILE

    def _read(self) -> list[dict[str, Any]]:
        try:
            document = orjson.loads(self._path.read_bytes())
            if document["schema"] > SCHEMA:
                raise JobFailed(f"{FILE}: written by a later warmd: upgrade warmd")
            return [asdict(Plan(**plan)) for plan in document["plans"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise JobFailed(f"{FILE}: cannot be read: {error}") from error

    def _record(self, plan: Plan) -> dict[str, Any]:
        """Write a plan to the disk, after the earlier ones; return it as plain values."""
        document = {"schema": SCHEMA, "plans": [asdict(one) for one in (*self.plans, plan)]}
        content = orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        self._ctx.patiently(lambda: write_atomic(self._path, content), self._ctx.run_dir)
        return asdict(plan)

    def _emit(self, plan: Plan, step: int) -> None:
        """Report the plan that the next steps follow."""
        before = plan_at(self.plans, plan.after - 1)
        is_cut = before is not None and plan.steps == step < before.steps
        if is_cut and before is not None and before.limit_s == plan.limit_s:
            self._ctx.emit(
                "warning",
                step=step,
                message=f"time_limit: the time is up: the training ends after step {step}, not "
                f"{before.steps} as planned before",
            )
        left_s = (plan.steps - step) * plan.step_s + (plan.evaluation_s or 0) + (plan.save_s or 0)
        self._ctx.emit(
            "plan",
            step=step,
            steps_total=plan.steps,
            step_s=plan.step_s,
            running_s=self._stopwatch.running_s,
            left_s=left_s,
            limit_s=plan.limit_s,
            evaluation_s=plan.evaluation_s,
            save_s=plan.save_s,
            is_last=plan.is_last,
        )


class Stopwatch:
    """The running time of a job over all executions, and the part of it that steps took."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._paused_s = 0.0
        self._evaluated_s = 0.0

    @property
    def running_s(self) -> float:
        """The running time of the job, without pauses and waits for a full disk."""
        return self._ctx.ran_s + self._ran_s

    @property
    def trained_s(self) -> float:
        """The running time of this execution without its evaluations."""
        return self._ran_s - self._evaluated_s

    @property
    def _ran_s(self) -> float:
        return time.monotonic() - self._ctx.began - self._paused_s - self._ctx.waited_s()

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = self._ran_s
        try:
            yield
        finally:
            self._paused_s += self._ran_s - began

    @contextmanager
    def evaluation(self) -> Iterator[list[float]]:
        """Measure an evaluation; the list that it yields has its duration after the block."""
        began, taken = self._ran_s, [0.0]
        try:
            yield taken
        finally:
            taken[0] = self._ran_s - began
            self._evaluated_s += taken[0]
