"""Log-probabilities of prompts and completions are those of transformers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
from engines import NATIVE_SIZES, make, prompt

from warmd.jobs.context import WarmModel
from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.engine.engine import Engine
from warmd.jobs.engine.kv_cache import CHUNK
from warmd.jobs.engine.layers import text_model
from warmd.jobs.engine.low_rank import Adapter
from warmd.jobs.engine.request import End, Request, Sampling, TokenLogprob

GREEDY = Sampling(temperature=0)
# With weights this large, transformers' own float32 results are up to 3e-4 from those in float64.
ROUNDING = 1e-3
KNOWN = len(tiny.SPECIAL) + len(tiny.CHARACTERS)


@pytest.fixture(scope="module", params=["pytorch", "native", "fallback"])
def model(request: pytest.FixtureRequest) -> Any:
    if request.param == "native":
        return make("Qwen2", **NATIVE_SIZES)
    if request.param == "fallback":
        found = make("Bloom", vocab_size=KNOWN, n_head=8)
        assert not Decoder.supports(found)
        return found
    return make("Qwen2", vocab_size=KNOWN)


@pytest.fixture
def engine(model: Any) -> Iterable[Engine]:
    warm = WarmModel(name="m", path=Path("none"), model=model, tokenizer=tiny.tokenizer())
    engine = Engine(warm)
    yield engine
    engine.close()


def complete(engine: Engine, *requests: Request) -> list[list[TokenLogprob]]:
    """Submit requests together; return the log-probabilities of each one's first completion."""
    for request in requests:
        engine.submit(request)
    found = []
    for request in requests:
        logprobs: list[TokenLogprob] = []
        while not isinstance(piece := request.pieces.get(timeout=60), End):
            if piece.index == 0:
                logprobs += piece.logprobs
                assert len(piece.logprobs) == (len(piece.ids) if request.num_top is not None else 0)
        assert piece.error is None
        found.append(logprobs)
    return found


def expected(model: Any, ids: list[int]) -> torch.Tensor:
    """Row t: log-probabilities of the token after ids[: t + 1]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits.float().log_softmax(-1)


def check(model: Any, ids: list[int], first: int, found: list[TokenLogprob], num_top: int) -> None:
    """Compare the log-probabilities of ids[first:]."""
    wanted = expected(model, ids)
    assert [one.token for one in found] == ids[first:]
    for place, one in enumerate(found, start=first):
        row = wanted[place - 1]
        assert one.logprob == pytest.approx(float(row[one.token]), abs=ROUNDING)
        assert [value for _, value in one.top] == pytest.approx(
            row.topk(num_top).values.tolist(), abs=ROUNDING
        )


def test_prompts_of_a_batch_are_scored_as_transformers_does(engine, model):
    lengths = (2, 17, CHUNK + 5, 3 * CHUNK + 1)
    requests = [
        Request(ids=prompt(n, n), sampling=GREEDY, max_tokens=0, num_top=3, scored_from=1)
        for n in lengths
    ]
    talking = Request(ids=prompt(9), sampling=GREEDY, max_tokens=30)
    complete(engine, talking, *requests)
    for request in requests:
        check(model, list(request.ids), 1, request.scores, 3)
    assert talking.scores == []


def test_a_cached_prefix_is_used_up_to_the_first_scored_token(engine, model):
    ids = prompt(2 * CHUNK + 9)
    complete(engine, Request(ids=ids, sampling=GREEDY, max_tokens=1))
    whole = Request(ids=ids, sampling=GREEDY, max_tokens=0, num_top=0, scored_from=1)
    rest = Request(ids=ids, sampling=GREEDY, max_tokens=0, num_top=0, scored_from=2 * CHUNK + 3)
    complete(engine, whole, rest)
    assert whole.stats.cached_tokens == 0
    if engine._runner.chunk is not None:
        assert rest.stats.cached_tokens == 2 * CHUNK
    check(model, ids, 1, whole.scores, 0)
    check(model, ids, 2 * CHUNK + 3, rest.scores, 0)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_generated_tokens_have_the_logprobs_of_the_model_whatever_the_sampling(
    engine, model, temperature
):
    ids = prompt(11)
    sampling = Sampling(temperature=temperature, top_k=5, frequency_penalty=1.0, seed=3)
    requests = [
        Request(ids=ids, sampling=sampling, max_tokens=12, num_top=2, num_completions=2),
        Request(ids=prompt(5), sampling=GREEDY, max_tokens=12),
    ]
    found, none = complete(engine, *requests)
    assert len(found) == 12
    check(model, ids + [one.token for one in found], len(ids), found, 2)
    assert none == []


def test_an_adapter_is_part_of_the_model_that_is_scored():
    base = make("Qwen2", vocab_size=KNOWN)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an attribute that transformers deprecates
        adapted = peft.get_peft_model(copy.deepcopy(base), config).eval()
    adapter = Adapter.served(text_model(adapted).layers)
    warm = WarmModel(name="m", path=Path("none"), model=base, tokenizer=tiny.tokenizer())
    engine = Engine(warm)
    ids = prompt(20)
    with_it, without = (
        Request(ids=ids, sampling=GREEDY, max_tokens=0, num_top=1, scored_from=1, adapter=one)
        for one in (adapter, None)
    )
    complete(engine, with_it, without)
    engine.close()
    check(adapted, ids, 1, with_it.scores, 1)
    check(base, ids, 1, without.scores, 1)
