"""Plans of a training with a time limit: how many steps fit, and the learning rate of each step.

A plan is made from the measured time of steps. It holds from one step on until the next plan; the
learning rate is continuous where they meet. Pure functions of numbers: `time_limit.py` measures,
and records each plan before a step follows it. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# The shares of the time limit at which the steps are planned again. The last step does not change
# after the last of them, so that a learning rate of nearly 0 does not rise again.
SHARES = (0.1, 0.5, 0.8)

# The remaining part of the full learning rate, by the share of the decay that is done: those of
# transformers' schedules after their warmup.
DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "constant": lambda done: 1.0,
    "constant_with_warmup": lambda done: 1.0,
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The steps of a training as planned after one of them."""

    after: int  # the step after which it was made: it holds for those that follow
    steps: int  # the last step; `after`: no step follows
    limit_s: float  # the time limit that it was made for
    running_s: float  # how long the job had run, over all executions
    step_s: float  # the measured time of a step, without evaluations
    evaluation_s: float | None  # of an evaluation; None: none was measured
    save_s: float | None  # of a checkpoint; None: none was measured
    warmup: int  # the step after which the learning rate is the full one
    factor: float  # the learning rate of the next step, as a share of the full one
    decayed: float  # the share of the decay that is done

    @property
    def is_last(self) -> bool:
        """Whether the last step does not change any more."""
        return next_share(self) is None

    def decayed_at(self, step: int) -> float:
        """Return the share of the decay that is done after a step."""
        begin = max(self.after, self.warmup)
        if step <= begin or self.steps <= begin:
            return self.decayed
        return min(self.decayed + (1 - self.decayed) * (step - begin) / (self.steps - begin), 1.0)


@dataclass(frozen=True, kw_only=True)
class Times:
    """What a plan is made from, in seconds."""

    limit_s: float
    running_s: float  # of the job, over all executions
    step_s: float  # of a step, with what is done between two steps but evaluations
    evaluation_s: float | None  # of the evaluation after the last step; None: not known, or none
    save_s: float | None  # of the checkpoint after the last step
    eval_every: int  # steps between evaluations; 0: none

    @property
    def left_s(self) -> float:
        """The time for steps: without the last evaluation and the last checkpoint."""
        return self.limit_s - self.running_s - (self.evaluation_s or 0) - (self.save_s or 0)

    @property
    def steps_left(self) -> int:
        """The steps that fit, with the evaluations between them."""
        between_s = (self.evaluation_s or 0) / self.eval_every if self.eval_every else 0.0
        return max(math.floor(self.left_s / max(self.step_s + between_s, 1e-9)), 0)


def next_share(plan: Plan) -> float | None:
    """Return the share of the time limit at which the steps are planned again; None: never."""
    return next((share for share in SHARES if share > plan.running_s / plan.limit_s), None)


def plan_at(plans: Sequence[Plan], step: int) -> Plan | None:
    """Return the plan that holds for the steps after this one; None before the first plan."""
    return next((plan for plan in reversed(plans) if plan.after <= step), None)


def rate(plans: Sequence[Plan], decay: Callable[[float], float], warmup: int, step: int) -> float:
    """Return the learning rate of the step after `step`, as a share of the full one.

    `warmup`: the steps of warmup before the first plan.
    """
    plan = plan_at(plans, step)
    if plan is None:
        return min(step / warmup, 1.0) if warmup else 1.0
    if step < plan.warmup:
        done = (step - plan.after) / (plan.warmup - plan.after)
        return plan.factor + (1 - plan.factor) * done
    return decay(plan.decayed_at(step))


def plan_after(
    step: int,
    times: Times,
    plans: Sequence[Plan],
    *,
    most: int,
    decay: Callable[[float], float],
    warmup: int,
    warmup_of: Callable[[int], int],
    is_revised: bool = False,
) -> Plan:
    """Return the plan that follows from the measured times, continuous in the learning rate.

    `warmup`: the steps of warmup before the first plan; `warmup_of` returns those of a training of
    so many steps. `is_revised`: the time limit has changed since the last plan: the learning rate
    is that of a training which had this plan from its first step on, as with more `steps`.
    """
    steps = min(step + times.steps_left, most)
    last = plan_at(plans, step)
    factor = rate(plans, decay, warmup, step)
    full = warmup_of(steps) if last is None else last.warmup
    decayed = 0.0 if last is None else last.decayed_at(step)
    if is_revised and step > full:
        decayed = min((step - full) / max(steps - full, 1), 1.0)
        factor = decay(decayed)
    elif decayed == 0.0 and factor < 1.0:
        full = max(full, step + 1)  # fewer steps of warmup than assumed before: it ends here
    return Plan(
        after=step,
        steps=steps,
        limit_s=times.limit_s,
        running_s=times.running_s,
        step_s=times.step_s,
        evaluation_s=times.evaluation_s,
        save_s=times.save_s,
        warmup=full,
        factor=factor,
        decayed=decayed,
    )
