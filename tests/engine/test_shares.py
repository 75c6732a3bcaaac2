"""Jobs share an engine by tokens: a small request is not held up by a large one of another job."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from engines import make, prompt
from prefill import FixedSpeed

from warmd.jobs.context import WarmModel
from warmd.jobs.engine.compute_thread import COMPUTE_THREAD
from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.engine.engine import Engine
from warmd.jobs.engine.kv_cache import CHUNK
from warmd.jobs.engine.request import End, Piece, Request, Sampling
from warmd.jobs.engine.scheduler import MAX_SEQUENCES
from warmd.jobs.engine.shares import divided
from warmd.jobs.engine.speculation import NoDrafts

GREEDY = Sampling(temperature=0)
KNOWN = len(tiny.SPECIAL) + len(tiny.CHARACTERS)


@pytest.fixture(scope="module")
def qwen() -> Any:
    return make("Qwen2", vocab_size=KNOWN)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The numbers of tokens of the sequences in each step that is computed."""
    found: list[list[int]] = []
    forward = Decoder.forward

    def recorded(decoder: Decoder, parts: Sequence[Any]) -> torch.Tensor:
        found.append([len(part.ids) for part in parts])
        return forward(decoder, parts)

    monkeypatch.setattr(Decoder, "forward", recorded)
    return found


@pytest.fixture
def enough() -> Iterator[threading.Event]:
    """Set at the end of the test: cancels the requests that are still running."""
    event = threading.Event()
    yield event
    event.set()


def start(model: Any, **settings: Any) -> Engine:
    warm = WarmModel(name="m", path=Path("none"), model=model, tokenizer=tiny.tokenizer())
    return Engine(warm, speculation=NoDrafts(), **settings)  # one token per sequence and step


def submit(engine: Engine, *requests: Request) -> None:
    """Submit requests that all are there for the same step."""
    with COMPUTE_THREAD.changed:
        for request in requests:
            engine.submit(request)


def texts(request: Request) -> list[str]:
    """The texts of a request's completions. Raises the error that ended it."""
    found = [""] * request.num_completions
    while not isinstance(piece := request.pieces.get(timeout=60), End):
        found[piece.index] += piece.text
    if piece.error is not None:
        raise piece.error
    return found


def crowd(
    enough: threading.Event, count: int = 40, *, length: int = 4, **how: Any
) -> list[Request]:
    """Requests of one job that would take the engine for minutes."""
    settings = {"num_completions": 128, "max_tokens": 400, "owner": "crowd", **how}
    return [
        Request(
            ids=prompt(length, n), sampling=Sampling(seed=n), is_canceled=enough.is_set, **settings
        )
        for n in range(count)
    ]


def test_another_job_gets_a_token_at_every_step_of_a_large_one(qwen, steps, enough):
    engine = start(qwen)
    large = crowd(enough)
    submit(engine, *large)
    for _ in range(3 * MAX_SEQUENCES):
        large[0].pieces.get(timeout=30)
    small = Request(ids=prompt(5), sampling=GREEDY, max_tokens=5, owner="small")
    submit(engine, small)
    before = len(steps)
    assert len(texts(small)[0]) > 0
    assert len(steps) - before <= 5 + 2  # the step that was running, and one that may have begun
    assert max(map(len, steps)) <= MAX_SEQUENCES
    enough.set()
    engine.close()


def test_another_job_waits_for_few_prompt_tokens_of_a_large_one(qwen, steps, enough):
    engine = start(qwen, prefill=FixedSpeed(320.0))  # 160 tokens in a step of this job alone
    large = crowd(enough, 200, num_completions=1, length=200)
    submit(engine, *large)
    large[0].pieces.get(timeout=30)
    small = Request(ids=prompt(5), sampling=GREEDY, max_tokens=5, owner="small")
    submit(engine, small)
    before = len(steps)
    texts(small)
    since = steps[before + 1 : -1]
    assert len(since) <= 5 + 1
    assert all(sum(count for count in step if count > 1) <= CHUNK + 5 for step in since)
    enough.set()
    engine.close()


def test_completions_do_not_change_when_their_job_has_places_for_a_part_only(qwen):
    def requests(owner: str) -> list[Request]:
        return [
            Request(
                ids=prompt(3 + 5 * n, n),
                sampling=Sampling(seed=n),
                max_tokens=4 + n,
                num_completions=count,
                owner=owner,
            )
            for n, count in enumerate((1, 70, 3))
        ]

    alone = []
    for request in requests("a"):
        engine = start(qwen)
        submit(engine, request)
        alone.append(texts(request))
        engine.close()
    engine = start(qwen, budget_bytes=Decoder(qwen).num_bytes(300))  # for about 30 at a time
    together = [requests(owner) for owner in "ab"]
    submit(engine, *(request for group in together for request in group))
    assert [[texts(request) for request in group] for group in together] == [alone] * 2
    engine.close()


def test_a_model_with_a_cache_of_its_own_begins_completions_later(enough):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=KNOWN, n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=None,
        bos_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    engine = start(transformers.GPT2LMHeadModel(config).requires_grad_(False).eval())
    one = Request(ids=prompt(5), sampling=GREEDY, max_tokens=4)
    submit(engine, one)
    many = Request(ids=prompt(5), sampling=GREEDY, max_tokens=4, num_completions=MAX_SEQUENCES + 9)
    submit(engine, many)
    assert texts(many) == texts(one) * (MAX_SEQUENCES + 9)
    engine.close()


def test_a_job_that_runs_leaves_memory_for_those_that_come(qwen, enough):
    num_bytes = Decoder(qwen).num_bytes
    engine = start(qwen, budget_bytes=num_bytes(2200))  # of which the crowd may take 1,925
    large = crowd(enough, num_completions=2)
    submit(engine, *large)
    large[1].pieces.get(timeout=30)
    small = Request(ids=prompt(9), sampling=GREEDY, max_tokens=20, owner="small")
    submit(engine, small)
    assert len(texts(small)[0]) > 0
    assert not any(isinstance(piece, End) for piece in drained(large[0]))
    enough.set()
    engine.close()


def test_a_request_that_waits_for_memory_is_passed_but_gets_it(qwen, enough):
    num_bytes = Decoder(qwen).num_bytes
    engine = start(qwen, budget_bytes=num_bytes(1000))
    (running,) = crowd(enough, 1, max_tokens=396, num_completions=1, owner="running")
    (next_one,) = crowd(enough, 1, max_tokens=96, num_completions=1, owner="running")
    (large,) = crowd(enough, 1, max_tokens=796, num_completions=1, owner="large")
    submit(engine, running)
    running.pieces.get(timeout=30)
    submit(engine, large, next_one)
    for seed in range(4):  # each passes: together with the large one it fits the budget
        small = Request(ids=prompt(9, seed), sampling=GREEDY, max_tokens=50, owner=seed)
        submit(engine, small)
        texts(small)
    wide = Request(ids=prompt(9), sampling=GREEDY, max_tokens=300, owner="wide")
    submit(engine, wide)  # does not pass: the large one could not begin when `running` ends
    large.pieces.get(timeout=60)
    assert wide.pieces.empty()
    enough.set()
    for request in (running, next_one, large, wide):
        texts(request)
    engine.close()


def test_a_canceled_request_begins_no_further_completions(qwen):
    engine = start(qwen)
    leave = threading.Event()
    (large,) = crowd(leave, 1)
    submit(engine, large)
    large.pieces.get(timeout=30)
    leave.set()
    seen = {piece.index for piece in drained(large, to_end=True) if isinstance(piece, Piece)}
    assert len(seen) < large.num_completions
    engine.close()


def drained(request: Request, *, to_end: bool = False) -> Iterator[Piece | End]:
    """The pieces that are there, or all up to the End."""
    while to_end or not request.pieces.empty():
        piece = request.pieces.get(timeout=30)
        yield piece
        if isinstance(piece, End):
            return


@pytest.mark.parametrize(
    ("total", "wanted", "given"),
    [
        (64, [64], [64]),
        (64, [64, 1], [63, 1]),
        (64, [64, 64, 1], [32, 31, 1]),
        (64, [10, 20], [10, 20]),
        (3, [5, 5, 5, 5], [1, 1, 1, 0]),
        (5, [], []),
        (0, [3], [0]),
    ],
)
def test_what_is_divided_is_divided_evenly(total, wanted, given):
    assert divided(total, wanted) == given
