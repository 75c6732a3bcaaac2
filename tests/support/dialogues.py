"""Dialogues that are played by plan: what the model writes in them, and what it should write."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from copy import deepcopy
from typing import Any

import pytest
import torch

from warmd.jobs.engine.dialogues import Dialogues, Turn
from warmd.jobs.engine.sampling import BatchSampler
from warmd.jobs.keyed_numbers import uniform

END = 5
SAMPLER = BatchSampler(temperature=1.0)

# The prompt of a dialogue, and what is given before each turn but the first.
Plans = dict[Hashable, tuple[list[int], list[list[int]]]]


def numbers(key: Hashable, turn: int, count: int = 6) -> Any:
    return uniform(count, key=key, turn=turn)


def played(made: Dialogues, plans: Plans) -> Any:
    turns: dict[Hashable, list[Turn]] = {key: [] for key in plans}
    for key, (prompt, _) in plans.items():
        made.begin(key, prompt, capacity=120)
        made.go_on(key, numbers(key, 0))
    while not made.is_idle:
        for key, turn in made.step().items():
            turns[key].append(turn)
            given = plans[key][1]
            if len(turns[key]) <= len(given):
                made.go_on(key, numbers(key, len(turns[key])), given[len(turns[key]) - 1])
    return turns


PLANS: Plans = {
    "a": ([7, 8, 9], [[10, 11], [12]]),
    "b": ([7, 8, 9], [[10]]),
    "c": (list(range(6, 46)), [list(range(6, 40)), [20, 21, 22]]),
    "d": (list(range(6, 46)), []),
}


def exact(turns: dict[Hashable, list[Turn]]) -> dict[Hashable, Any]:
    return {
        key: [
            (t.segment.ids, t.segment.entropies, t.segment.logps, t.text, t.reason) for t in of_key
        ]
        for key, of_key in turns.items()
    }


@torch.no_grad()
def check(
    turns: dict[Hashable, list[Turn]], plans: Plans, model: Any, ends: Collection[int] = (END,)
) -> None:
    """Check that turns are those of the model without a cache, computed in float64."""
    exact = deepcopy(model).double()
    for key, (prompt, given) in plans.items():
        ids = list(prompt)
        for number, turn in enumerate(turns[key]):
            ids += given[number - 1] if number else []
            for place, token in enumerate(turn.segment.ids):
                logits = exact(torch.tensor([ids])).logits[:, -1].float()
                uniform_ = torch.tensor([numbers(key, number)[place]], dtype=torch.float64)
                drawn, nats = SAMPLER.draw(logits, uniform_)
                assert token == int(drawn)
                assert turn.segment.entropies[place] == pytest.approx(float(nats), abs=1e-4)
                logp = float(logits.log_softmax(-1)[0, token])
                assert turn.segment.logps[place] == pytest.approx(logp, abs=1e-4)
                ids.append(token)
            assert turn.reason == ("stop" if turn.segment.ids[-1] in ends else "length")
        assert len(turns[key]) == len(given) + 1
