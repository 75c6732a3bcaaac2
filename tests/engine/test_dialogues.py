"""Completions in several turns: as without a cache, and alone as among others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from dialogues import END, PLANS, SAMPLER, Plans, check, exact, numbers, played
from engines import NATIVE_SIZES, make

from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.engine.dialogues import Dialogues
from warmd.jobs.engine.fallback import FallbackRunner
from warmd.jobs.engine.kv_cache import CHUNK, KVCache
from warmd.jobs.engine.rollouts import Drawing


@pytest.fixture(scope="module", params=["pytorch", "native", "fallback"])
def runner(request: pytest.FixtureRequest) -> Any:
    known = len(tiny.SPECIAL) + len(tiny.CHARACTERS)
    sizes = NATIVE_SIZES if request.param == "native" else {"vocab_size": known}
    model = make("Qwen2", **sizes)
    with torch.no_grad():
        for without_text in (slice(len(tiny.SPECIAL)), slice(known, None)):
            model.lm_head.weight[without_text] = 0  # such tokens would be rarely written
    made: Any = FallbackRunner(model) if request.param == "fallback" else Decoder(model)
    made.model_of_test = model
    return made


def dialogues(
    runner: Any, *, ends: frozenset[int] = frozenset([END]), **settings: Any
) -> Dialogues:
    how = Drawing(sampler=SAMPLER, temperature=1.0, max_new_tokens=0, ends=ends, wants_logps=True)
    return Dialogues(runner, how, tiny.tokenizer(), **{"most_sequences": 8, **settings})


def test_turns_are_those_of_the_model_without_a_cache(runner):
    check(played(dialogues(runner), PLANS), PLANS, runner.model_of_test)


@pytest.mark.parametrize(
    "runner",
    ["pytorch", *(pytest.param(one, marks=pytest.mark.slow) for one in ("native", "fallback"))],
    indirect=True,
)
def test_an_observation_may_begin_anywhere_on_the_grid_of_attention(runner, monkeypatch):
    new = runner.new

    def filled(capacity: int) -> Any:
        made = new(capacity)
        if isinstance(made, KVCache):
            made.data.fill_(torch.nan)  # what is read before it is written shows
        return made

    monkeypatch.setattr(runner, "new", filled)
    sizes = range(CHUNK - 8, CHUNK + 2)
    plans: Plans = {size: ([*range(6, 6 + size)], [[10] * 9, [11] * 40]) for size in sizes}
    check(played(dialogues(runner), plans), plans, runner.model_of_test)


def test_a_dialogue_has_the_same_bits_alone_and_among_others(runner):
    together = exact(played(dialogues(runner), PLANS))
    few = exact(played(dialogues(runner, most_sequences=2), PLANS))
    alone = {key: exact(played(dialogues(runner), {key: plan}))[key] for key, plan in PLANS.items()}
    assert together == few == alone


def test_the_tokens_of_a_dialogue_are_what_was_given_and_written(runner):
    made = dialogues(runner)
    turns = played(made, {"a": PLANS["a"]})["a"]
    prompt, given = PLANS["a"]
    expected = [
        *prompt,
        *turns[0].segment.ids,
        *given[0],
        *turns[1].segment.ids,
        *given[1],
        *turns[2].segment.ids,
    ]
    assert made._held["a"].ids == expected
    made.end("a")
    assert not made._held


def test_a_turn_of_a_dialogue_that_ends_meanwhile_is_given_up(runner):
    expected = exact(played(dialogues(runner), {"b": PLANS["b"]}))["b"][0]
    made = dialogues(runner, ends=frozenset())
    for key in ("a", "b"):
        made.begin(key, [7, 8, 9], capacity=40)
        made.go_on(key, numbers(key, 0, 6))
    assert made.step() == {}
    made.end("a")
    rest = [made.step() for _ in range(5)]
    assert [list(over) for over in rest] == [[], [], [], [], ["b"]]
    assert rest[-1]["b"].segment.ids[:1] == expected[0][:1]
    made.begin("c", [7], capacity=9)
    made.go_on("c", numbers("c", 0, 6))
    made.end("c")  # before it was begun
    assert made.step() == {}
    assert made.is_idle


def test_a_turn_ends_where_the_dialogue_has_no_room_left(runner):
    made = dialogues(runner, ends=frozenset())
    made.begin("a", [7, 8, 9], capacity=12)
    assert made.go_on("a", numbers("a", 0, 6)) == 6
    turn = None
    while turn is None:
        turn = made.step().get("a")
    assert (len(turn.segment.ids), turn.reason) == (6, "length")
    assert made.go_on("a", numbers("a", 1, 6), [10, 11]) == 1
    while not made.is_idle:
        made.step()
    assert len(made._held["a"].ids) == 12
    assert made.go_on("a", numbers("a", 2, 6)) == 0


def test_a_text_ends_a_turn_with_the_token_that_completes_it(runner):
    free = dialogues(runner, ends=frozenset())
    (turn,) = played(free, {"a": ([7, 8, 9], [])})["a"]
    stop = turn.text[2:4]
    assert len(turn.text) >= 4
    made = dialogues(runner, ends=frozenset(), stop=(stop,))
    (cut,) = played(made, {"a": ([7, 8, 9], [])})["a"]
    assert cut.reason == "stop"
    assert cut.segment.ids == turn.segment.ids[: len(cut.segment.ids)]
    assert len(cut.segment.ids) <= 4
    assert stop not in cut.text
    assert turn.text.startswith(cut.text)
    assert np.isfinite(cut.segment.logps).all()
