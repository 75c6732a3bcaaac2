"""Batched sampling for all sequences of a step, as an engine does on a GPU."""

from __future__ import annotations

import pytest
import torch

from warmd.jobs.engine.request import Sampling
from warmd.jobs.engine.sampling import SequenceSampler, sample_batch
from warmd.jobs.errors import JobFailed

KINDS = [
    Sampling(temperature=0),
    Sampling(temperature=0.7),
    Sampling(temperature=1e-3),
    Sampling(temperature=0, presence_penalty=1.5),
    Sampling(temperature=1.2, frequency_penalty=0.5),
]


def samplers(kinds: list[Sampling]) -> list[SequenceSampler]:
    return [SequenceSampler(kind, index) for index, kind in enumerate(kinds)]


def test_a_batched_sequence_gets_the_same_tokens_as_alone():
    torch.manual_seed(0)
    together, alone = samplers(KINDS * 3), samplers(KINDS * 3)
    for _ in range(20):
        logits = torch.randn(len(together), 50)
        found = sample_batch(together, list(logits))
        assert found == [one.sample(row) for one, row in zip(alone, logits, strict=True)]


@pytest.mark.parametrize(
    ("limit", "kept"),
    [({"top_k": 3}, 3), ({"top_p": 0.5}, 2), ({"top_k": 5, "top_p": 0.8}, 3)],
)
def test_tokens_outside_top_k_and_top_p_are_not_sampled(limit, kept):
    logits = torch.tensor([3.0, 2.9, 2.8, 0.0, -1.0, -2.0])
    chosen = samplers([Sampling(temperature=1, seed=7, **limit)] * 300)
    assert set(sample_batch(chosen, [logits] * 300)) == set(range(kept))


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_in_the_logits_of_one_sequence_fails_that_one(bad, temperature):
    chosen = samplers([Sampling(temperature=temperature)] * 3)
    logits = [torch.tensor([1.0, -40.0]), torch.tensor([bad, 0.0]), torch.tensor([-40.0, 1.0])]
    first, spoilt, last = sample_batch(chosen, logits)
    assert (first, last) == (0, 1)
    assert isinstance(spoilt, JobFailed)
