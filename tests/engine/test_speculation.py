"""Speculative decoding: the same bits as steps of one token, and drafts only where they pay."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_vision
import torch
from drafting import Always, Recorded, RecordedLookup
from engines import NATIVE_SIZES, make, prompt

from warmd.configs.precision import PRECISIONS
from warmd.jobs.context import WarmModel
from warmd.jobs.engine import forms
from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.engine.drafts import Lookup, Prompt, Rates
from warmd.jobs.engine.engine import Engine
from warmd.jobs.engine.image_tokens import insert_image_tokens
from warmd.jobs.engine.images import Budget
from warmd.jobs.engine.layers import text_model
from warmd.jobs.engine.low_rank import Adapter, LowRank
from warmd.jobs.engine.parts import Part
from warmd.jobs.engine.request import End, Piece, Request, Sampling
from warmd.jobs.engine.speculation import MAX_ROWS, NoDrafts, Speculation, StepTimes
from warmd.jobs.engine.thinking import Thinking

GREEDY = Sampling(temperature=0)
PACKED = 8  # passes after which all layers are packed
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "mood": {"enum": ["ab", "ac"]}},
        "required": ["name", "mood"],
        "additionalProperties": False,
    }
)
Made = Callable[[Engine], Request]


# --- One pass over several tokens ----------------------------------------------------------------


def packed(model: Any, precision: str) -> Decoder:
    decoder = Decoder(model, precision=precision)
    for _ in range(PACKED):
        decoder.forward([Part(decoder.new(1), [3], True)])
    return decoder


def verify(kv: Any, ids: Sequence[int]) -> Part:
    return Part(kv, ids, True, wants_all_logits=True, verifies=True)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("threads", [3], indirect=True)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "sizes", [{**NATIVE_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}, {}]
)
def test_a_pass_over_drafts_has_the_bits_of_single_steps(sizes, precision, threads, is_fused):
    with torch.inference_mode():
        decoder = packed(make("Qwen2", **sizes), precision)
        if not is_fused:
            decoder._fused_steps = None
        prompts = [prompt(1 + 37 * number % 100, number) for number in range(3)]
        pairs = [(decoder.new(200), decoder.new(200)) for _ in prompts]
        for ids, pair in zip(prompts, pairs, strict=True):
            for kv in pair:
                decoder.forward([Part(kv, ids, True)])
        rest = {0: prompt(5, 7), 1: [9], 2: prompt(9, 8)}
        together = decoder.forward([verify(pairs[n][0], ids) for n, ids in rest.items()])
        single = [
            decoder.forward([Part(pairs[n][1], [token], True)])
            for n, ids in rest.items()
            for token in ids
        ]
    assert torch.equal(together, torch.cat(single))
    for one, other in pairs:
        assert one.length == other.length
        assert torch.equal(one.data[..., : one.length, :], other.data[..., : one.length, :])


@pytest.mark.parametrize("precision", ["int8"])
def test_rejected_positions_are_overwritten(precision):
    ids = prompt(40)
    with torch.inference_mode():
        decoder = packed(make("Qwen2", **NATIVE_SIZES), precision)
        one, other = decoder.new(60), decoder.new(60)
        for kv in (one, other):
            decoder.forward([Part(kv, ids, True)])
        decoder.forward([verify(one, [5, 6, 7, 8])])
        one.length -= 2
        for token in (5, 6):
            decoder.forward([Part(other, [token], True)])
        found = decoder.forward([verify(one, [9, 10, 11, 12])])
        wanted = [decoder.forward([Part(other, [token], True)]) for token in (9, 10, 11, 12)]
    assert torch.equal(found, torch.cat(wanted))
    assert torch.equal(one.data[..., : one.length, :], other.data[..., : one.length, :])


# --- Requests ------------------------------------------------------------------------------------


def serve(model: Any, speculation: Speculation, precision: str = "native") -> Engine:
    warm = WarmModel(name="m", path=Path("m"), model=model, tokenizer=tiny.byte_tokenizer())
    return Engine(warm, precision=precision, speculation=speculation)


def pieces_of(requests: Sequence[Request]) -> list[list[list[Piece]]]:
    """The pieces of each request, by completion. Raises the error that ended it."""
    found = []
    for request in requests:
        pieces: list[list[Piece]] = [[] for _ in range(request.num_completions)]
        while not isinstance(piece := request.pieces.get(timeout=60), End):
            pieces[piece.index].append(piece)
        if piece.error is not None:
            raise piece.error
        found.append(pieces)
    return found


def complete(
    model: Any, speculation: Speculation, made: Sequence[Made], precision: str = "native"
) -> tuple[list[Request], list[list[list[Piece]]]]:
    """Complete requests: half of them alone, the others together."""
    engine = serve(model, speculation, precision)
    requests, pieces, half = [make_one(engine) for make_one in made], [], len(made) // 2
    for request in requests[:half]:
        engine.submit(request)
        pieces += pieces_of([request])
    for request in requests[half:]:
        engine.submit(request)
    pieces += pieces_of(requests[half:])
    engine.close()
    return requests, pieces


def adapter_of(model: Any) -> Adapter:
    """An adapter that changes the model strongly."""
    hidden, inner = model.config.hidden_size, model.config.intermediate_size
    generator = torch.Generator().manual_seed(3)
    a, b = (0.2 * torch.randn(shape, generator=generator) for shape in ((4, inner), (hidden, 4)))
    down = LowRank(a, b, 2.0, "mlp.down_proj", slice(0, hidden))
    of_layer = {"qkv": [], "out": [], "gate_up": [], "down": [down]}
    return Adapter([of_layer for _ in text_model(model).layers], is_batch_invariant=True)


def mixed(model: Any, count: int, tokens: int) -> list[Made]:
    """Requests of all kinds; every second prompt repeats itself."""
    adapter = adapter_of(model)

    def settings(engine: Engine, number: int) -> dict[str, Any]:
        kinds: list[dict[str, Any]] = [
            {"sampling": GREEDY},
            {"sampling": Sampling(seed=number, temperature=0.3)},
            {"sampling": Sampling(seed=number, top_p=0.9, top_k=30), "num_completions": 2},
            {"sampling": Sampling(temperature=0, frequency_penalty=0.3, presence_penalty=0.1)},
            {"sampling": GREEDY, "grammar": forms.grammar_of(engine, json_schema=SCHEMA)},
            {"sampling": Sampling(temperature=0, bias=((70, 9.0), (71, 8.0))), "num_top": 2},
            {"sampling": Sampling(seed=number, min_p=0.1), "adapter": adapter, "num_top": 0},
            {"sampling": GREEDY, "stop": ("a", "b", "z"), "scored_from": 1, "num_top": 1},
            {"sampling": GREEDY, "thinking": Thinking(40, 41, 5)},
            {"sampling": GREEDY, "adapter": adapter},
        ]
        return kinds[number % len(kinds)]

    def request(engine: Engine, number: int) -> Request:
        ids = prompt(1 + 17 * number % 60, number)
        ids = ids * 2 if number % 2 else ids
        return Request(ids=ids, max_tokens=tokens - number % 5, **settings(engine, number))

    return [partial(request, number=number) for number in range(count)]


def tokens_of(pieces: Sequence[Sequence[Sequence[Piece]]]) -> list[list[int]]:
    """The tokens of the first completion of each request."""
    return [[token for piece in of_request[0] for token in piece.ids] for of_request in pieces]


def partly_wrong(ids: Sequence[int], share: float, seed: int) -> list[int]:
    """Tokens of which a share is replaced."""
    draw = random.Random(seed)
    return [draw.randrange(3, 80) if draw.random() < share else token for token in ids]


def check_equality(model: Any, precision: str, count: int, tokens: int) -> tuple[int, int]:
    """Compare with and without speculation; return numbers of drafted and accepted tokens."""
    made = mixed(model, count, tokens)
    plain_requests, plain = complete(model, NoDrafts(), made, precision)
    assert not any(one.stats.drafted_tokens for one in plain_requests)
    texts = {
        tuple(request.ids): partly_wrong(ids, 0.3, number)
        for number, (request, ids) in enumerate(zip(plain_requests, tokens_of(plain), strict=True))
    }
    drafted = accepted = 0
    for speculation in (Always(15), Recorded(texts), Speculation()):
        requests, found = complete(model, speculation, made, precision)
        assert found == plain
        assert [one.scores for one in requests] == [one.scores for one in plain_requests]
        drafted += sum(one.stats.drafted_tokens for one in requests)
        accepted += sum(one.stats.accepted_tokens for one in requests)
    return drafted, accepted


def model_of(name: str, **sizes: Any) -> Any:
    """A model whose vocabulary is that of the byte tokenizer, and some more."""
    return make(name, **{**NATIVE_SIZES, "vocab_size": 320, "initializer_range": 0.1, **sizes})


@pytest.mark.parametrize(
    ("precision", "sizes"),
    [
        ("native", {}),
        ("int8", {}),
        pytest.param("bf16", {}, marks=pytest.mark.slow),
        ("native", {"hidden_size": 72, "intermediate_size": 160}),  # without native code
    ],
)
def test_completions_are_the_same_with_drafts_and_without(precision, sizes):
    drafted, accepted = check_equality(model_of("Qwen2", **sizes), precision, 10, 24)
    assert 0 < accepted < drafted


@pytest.mark.nightly(
    part="oracles", catches="drafts that change a completion of some architecture or precision"
)
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("name", "sizes", "dtype"),
    [
        ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2}, torch.float32),
        ("Qwen3", {"head_dim": 64}, torch.float32),
        ("Qwen2", {"hidden_size": 72, "intermediate_size": 160}, torch.float32),
        ("Mistral", {"sliding_window": None}, torch.bfloat16),
    ],
)
def test_completions_of_any_decoder_are_the_same_with_drafts(
    name, sizes, dtype, precision, threads
):
    drafted, accepted = check_equality(model_of(name, **sizes).to(dtype), precision, 30, 50)
    assert 0 < accepted < drafted


def test_a_repetition_is_drafted_and_accepted():
    model = model_of("Qwen2")
    made = [lambda _: Request(ids=prompt(6) * 4, sampling=GREEDY, max_tokens=300)]
    (plain,), wanted = complete(model, NoDrafts(), made)
    (request,), found = complete(model, Always(), made)
    assert found == wanted
    assert request.stats.accepted_tokens > 100
    assert plain.stats.drafted_tokens == plain.stats.accepted_tokens == 0


def test_wrong_drafts_change_nothing_and_are_counted():
    model, ids = model_of("Qwen2"), tuple(prompt(20))
    made = [lambda _: Request(ids=ids, sampling=GREEDY, max_tokens=50, num_top=1)]
    _, wanted = complete(model, NoDrafts(), made)
    wrong = [token % 80 + 3 for token in tokens_of(wanted)[0]]
    (request,), found = complete(model, Recorded({ids: wrong}), made)
    assert found == wanted
    assert request.stats.accepted_tokens == 0
    assert request.stats.drafted_tokens == 4 * 45 + 3 + 2 + 1  # never more than could be used


def test_right_drafts_are_all_accepted():
    model, ids = model_of("Qwen2"), tuple(prompt(20))
    made = [lambda _: Request(ids=ids, sampling=GREEDY, max_tokens=51)]
    _, wanted = complete(model, NoDrafts(), made)
    (request,), found = complete(model, Recorded({ids: tokens_of(wanted)[0]}), made)
    assert found == wanted
    assert request.stats.drafted_tokens == request.stats.accepted_tokens == 40


def test_completions_after_images_are_the_same_with_drafts(tmp_path):
    model, tokenizer = tiny_vision.save(tmp_path)
    warm = WarmModel(name="demo", path=tmp_path, model=model, tokenizer=tokenizer)
    words = tokenizer("what is it? what is ")["input_ids"]
    start = [2, tiny_vision.IMAGE]
    found = []
    for speculation in (NoDrafts(), Always()):
        engine = Engine(warm, speculation=speculation)
        requests = []
        for seed in range(4):
            urls = [tiny_vision.url(tiny_vision.png(120, 60, seed))]
            ids, seen = insert_image_tokens(warm, [*start, *words], urls, Budget())
            requests.append(Request(ids=ids, images=seen, sampling=GREEDY, max_tokens=60))
            engine.submit(requests[-1])
        found.append(pieces_of(requests))
        engine.close()
    assert found[0] == found[1]
    assert sum(one.stats.accepted_tokens for one in requests) > 0


# --- What is drafted -----------------------------------------------------------------------------


def lookup_of(ids: Sequence[int]) -> Lookup:
    lookup = Lookup(Prompt(ids[:-1]), Rates())
    lookup.add(ids[-1])
    return lookup


@pytest.mark.parametrize(
    ("ids", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [9, 2, 3, 8]),  # the longest match, not the latest
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4]),  # the latest of equally long ones
        ([5, 7, 7, 7], [7, 7, 7, 7]),
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),
        ([1, 2, 3, 2, 4], []),
        ([1, 2], []),
        ([1], []),
    ],
)
def test_drafts_follow_the_longest_match(ids, drafts):
    assert lookup_of(ids).drafts(4) == drafts


def test_matches_are_the_longest_ones_of_short_texts():
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(3) for _ in range(draw.randrange(2, 16))]
        longest = max(
            (
                length
                for end in range(2, len(ids))
                for length in range(2, end + 1)
                if ids[end - length : end] == ids[-length:]
            ),
            default=0,
        )
        lookup = Lookup(Prompt(()), Rates())
        for token in ids:
            lookup.add(token)
        assert lookup._length == longest


def test_the_chains_of_a_prompt_are_those_of_its_tokens_one_by_one():
    draw = random.Random(0)
    for length in (0, 1, 2, 3, 60):
        ids = [draw.randrange(4) for _ in range(length)]
        at_once, one_by_one = Lookup(Prompt(ids), Rates()), Lookup(Prompt(()), Rates())
        for token in (*ids, 2):
            one_by_one.add(token)
        at_once.add(2)
        for name in ("_ids", "_latest", "_earlier", "_next", "_length"):
            assert getattr(at_once, name) == getattr(one_by_one, name), (ids, name)


def test_completions_of_a_prompt_share_its_chains_and_no_tokens():
    speculation, ids = Speculation(), [1, 2, 3, 1, 2]
    one, other = speculation.lookup(ids), speculation.lookup(ids)
    assert one is not None
    assert other is not None
    assert one._prompt is other._prompt
    one.add(3)
    other.add(4)
    assert (one.drafts(1), other.drafts(1)) == ([1], [])
    assert ids == [1, 2, 3, 1, 2]


def test_a_token_of_a_long_text_takes_no_longer_than_one_of_a_short_text():
    """Counted in compared tokens: a pair that is everywhere is not compared everywhere."""
    lookup, compared = Lookup(Prompt(()), Rates()), 0
    common = lookup._common

    def counted(position: int) -> int:
        nonlocal compared
        compared += 1
        return common(position)

    lookup._common = counted  # type: ignore[method-assign]
    for number in range(2000):
        for token in (1, 2, 10 + number):
            lookup.add(token)
    assert compared <= 8 * 2000


def repeating() -> tuple[Lookup, Speculation]:
    """A sequence that repeats four tokens."""
    speculation = Speculation()
    lookup = speculation.lookup([1, 2, 3, 4] * 3)
    assert lookup is not None
    for number in range(40):
        lookup.add(1 + number % 4)
    return lookup, speculation


def speedup(share: float, row_cost: float) -> float:
    """How many times as fast 2,000 tokens are with drafts, of which a share is right.

    `row_cost`: of a further row, relative to a step; a step varies by 10 %, and one in a hundred
    takes twice as long.
    """
    draw, speculation, tokens, seconds = random.Random(0), Speculation(), 2000, 0.0
    text = [int(draw.random() < share) for _ in range(tokens)]
    lookup: Lookup = RecordedLookup([1] * tokens, speculation._rates)
    place = 0
    while place < tokens:
        (count,) = speculation.counts([lookup], [tokens - place - 1])
        took = (1 + row_cost * count) * draw.uniform(0.9, 1.1) * (2 if draw.random() < 0.01 else 1)
        speculation.measure(1 + count, took)
        seconds += took
        drawn = text[place : place + 1 + count]
        accepted = drawn[:-1].index(0) + 1 if 0 in drawn[:-1] else len(drawn)
        for token in drawn[:accepted]:
            lookup.add(token)
        place += accepted
    return 1.01 * tokens / seconds


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("row_cost", [0.1, 0.3, 0.6, 1.0])
def test_drafts_are_never_slower(share, row_cost):
    assert speedup(share, row_cost) > 0.98


@pytest.mark.parametrize(
    ("share", "row_cost", "least"), [(0.6, 0.1, 1.5), (0.9, 0.1, 2.7), (0.9, 0.3, 1.6)]
)
def test_right_drafts_are_faster(share, row_cost, least):
    assert speedup(share, row_cost) > least


def test_a_change_of_speed_changes_no_decision():
    """Other programs slow all steps; what was measured before stays comparable."""
    times = StepTimes()
    for number in range(100):
        times.measure(1 if number % 10 else 4, 0.02 if number % 10 else 0.03)
    for _ in range(25):
        times.measure(4, 0.09)
    assert times.relative(4) / times.relative(1) == pytest.approx(1.5, rel=0.15)
    assert times.relative(3) / times.relative(1) == pytest.approx(1.33, rel=0.15)


def test_more_rows_are_never_expected_to_be_faster_than_measured_ones():
    """A kernel may be slower for six rows than for seven: from them nothing follows for 14."""
    times = StepTimes()
    for rows, seconds in ((1, 0.02), (6, 0.06), (7, 0.03)):
        times.measure(rows, seconds)
    assert times.relative(times.most) == times.relative(7) == pytest.approx(1.5)


def test_rows_of_a_step_are_bounded():
    lookup, speculation = repeating()
    speculation.measure(MAX_ROWS, 0.02)
    for count in (1, 5, 40, 64, 70):
        for _ in range(4):
            speculation.measure(count, 0.02)
        found = speculation.counts([lookup] * count, [100] * count)
        assert sum(found) == max(0, min(MAX_ROWS - count, 15 * count))
    assert speculation.counts([lookup, lookup], [0, 0]) == [0, 0]
