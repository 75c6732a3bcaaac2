"""Batched sampling for all sequences of a step, as an engine does on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MinPLogitsWarper

from warmd.jobs.engine.request import Sampling
from warmd.jobs.engine.sampling import SequenceSampler, sample_batch
from warmd.jobs.errors import JobFailed

KINDS = [
    Sampling(temperature=0),
    Sampling(temperature=0.7),
    Sampling(temperature=1e-3),
    Sampling(temperature=0, presence_penalty=1.5),
    Sampling(temperature=1.2, frequency_penalty=0.5),
    Sampling(temperature=1.5, min_p=0.3),
    Sampling(temperature=0.9, bias=((3, 2.5), (7, -100.0))),
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
    [
        ({"top_k": 3}, 3),
        ({"top_p": 0.5}, 2),
        ({"top_k": 5, "top_p": 0.8}, 3),
        ({"min_p": 0.85}, 2),
        ({"min_p": 0.04, "top_p": 0.9}, 3),
        ({"min_p": 1}, 1),
    ],
)
def test_tokens_outside_top_k_top_p_and_min_p_are_not_sampled(limit, kept):
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


OTHER_TEMPERATURE = pytest.mark.nightly(
    part="oracles", catches="a temperature at which min-p keeps other tokens than in transformers"
)


@pytest.mark.parametrize("min_p", [0.02, 0.2, 0.7])
@pytest.mark.parametrize("temperature", [0.5, pytest.param(1.5, marks=OTHER_TEMPERATURE)])
def test_min_p_keeps_the_tokens_that_it_keeps_in_transformers(min_p, temperature):
    torch.manual_seed(1)
    logits = 3 * torch.randn(40)
    warper: Any = MinPLogitsWarper(min_p)
    warped = warper(None, logits[None] / temperature)[0]
    wanted = set(warped.isfinite().nonzero().flatten().tolist())
    sampling = Sampling(temperature=temperature, min_p=min_p, seed=3)
    assert {one.sample(logits) for one in samplers([sampling] * 4000)} == wanted
    assert set(sample_batch(samplers([sampling] * 4000), [logits] * 4000)) == wanted


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_bias_moves_a_logit_and_forbids_no_token_but_by_its_size(temperature):
    logits = torch.tensor([1.0, 0.0, -1.0])
    for bias, wanted in (
        (((0, -100.0),), {1} if temperature == 0 else {1, 2}),
        (((2, 100.0),), {2}),
        (((0, -100.0), (1, -100.0)), {2}),
    ):
        chosen = samplers([Sampling(temperature=temperature, bias=bias)] * 100)
        assert {one.sample(logits) for one in chosen} == wanted
    assert logits.tolist() == [1.0, 0.0, -1.0]
