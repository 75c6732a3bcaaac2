"""Compares the steps and the weights of both sides. Imports torch.

Both sides compute the same sums in another order, so that they differ by rounding. AdamW divides a
gradient by its size: a weight whose gradient is little but rounding moves as far as any other, and
in any direction. What a weight may differ by is therefore computed from its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

LOSS = 1e-4  # relative
LOSS_FLOOR = 1e-5  # absolute; the loss of GRPO is about 0
GRADIENT_NORM = 1e-3  # relative
GRADIENT_NORM_FLOOR = 1e-6
GRADIENT = 1e-4  # rounding of a gradient, relative to the largest one of the step
CHANGE = 1e-3  # of a weight, relative to the largest change of a weight
_ULP = torch.finfo(torch.float32).eps
_MOST = 4.0  # learning rates that two updates of AdamW differ by at most


@dataclass(frozen=True)
class Step:
    """What a side reports of a step."""

    loss: float
    grad_norm: float
    learning_rate: float


@dataclass(frozen=True)
class Side:
    """The steps of a side, and its weights after them."""

    steps: Sequence[Step]
    weights: Mapping[str, Tensor]


@dataclass
class Rounding:
    """How much of the gradients of a weight is rounding, the most of all steps.

    `shares`: by the name of the weight, relative to the gradient itself.
    """

    shares: dict[str, Tensor] = field(default_factory=dict)

    def add(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Add the gradients of a step."""
        known = {name: one.abs() for name, one in gradients.items() if one is not None}
        error = GRADIENT * max((float(one.max()) for one in known.values()), default=0.0)
        for name, size in known.items():
            share = (error / size).nan_to_num_(nan=_MOST).clamp_(max=_MOST)
            before = self.shares.get(name)
            self.shares[name] = share if before is None else torch.maximum(before, share)


def compare(
    begun: Mapping[str, Tensor], theirs: Side, ours: Side, rounding: Rounding
) -> dict[str, Any]:
    """Return steps, weights and what differs by more than rounding, as plain JSON values.

    `begun`: the initial weights. `differences`: one line each, none when the sides agree.
    """
    steps = [
        {"step": number, "trl": asdict(their), "warmd": asdict(our)}
        for number, (their, our) in enumerate(zip(theirs.steps, ours.steps, strict=True), 1)
    ]
    weights = _compare_weights(begun, theirs, ours, rounding)
    differences = []
    for name, relative, floor in (
        ("loss", LOSS, LOSS_FLOOR),
        ("grad_norm", GRADIENT_NORM, GRADIENT_NORM_FLOOR),
        ("learning_rate", 1e-9, 0.0),
    ):
        for number, pair in enumerate(zip(theirs.steps, ours.steps, strict=True), 1):
            their, our = (float(getattr(step, name)) for step in pair)
            if not math.isclose(their, our, rel_tol=relative, abs_tol=floor):
                differences.append(f"{name} of step {number}: {their:.9g} and {our:.9g}")
                break
    if weights["beyond_rounding"]:
        differences.append(
            f"weights: {weights['beyond_rounding']:,} of {weights['weights']:,} beyond rounding, "
            f"the first in {weights['first']}"
        )
    return {"steps": steps, "weights": weights, "differences": differences}


def _compare_weights(
    begun: Mapping[str, Tensor], theirs: Side, ours: Side, rounding: Rounding
) -> dict[str, Any]:
    """Return the largest difference of a weight, and how many differ by more than rounding."""
    change = max(
        (float((theirs.weights[name] - one).abs().max()) for name, one in begun.items()),
        default=0.0,
    )
    moved = sum(step.learning_rate for step in theirs.steps)
    largest, beyond, first = 0.0, 0, None
    for name, start in begun.items():
        difference = (theirs.weights[name] - ours.weights[name]).abs()
        share = rounding.shares.get(name, torch.zeros(()))
        # Each update also rounds the weight itself.
        allowed = (len(theirs.steps) + 1) * _ULP * start.abs() + CHANGE * change + moved * share
        count = int((~(difference <= allowed)).sum())  # NaN is beyond
        largest = max(largest, float(difference.max()))
        if count and first is None:
            first = name
        beyond += count
    return {
        "weights": sum(one.numel() for one in begun.values()),
        "largest_difference": largest,
        "largest_change": change,
        "relative": largest / change if change else None,
        "beyond_rounding": beyond,
        "first": first,
    }
