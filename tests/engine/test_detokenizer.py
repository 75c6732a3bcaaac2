"""Incremental detokenization and sampling."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, strategies as st
from odd_tokenizers import LETTERS, bytewise, spaced
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from warmd.jobs.engine.detokenizer import TextStream, text_of
from warmd.jobs.engine.request import Sampling
from warmd.jobs.engine.sampling import SequenceSampler

TOKENIZER = tiny.tokenizer()


BYTEWISE = bytewise()
SPACED = spaced()


def stream(text: str, stop: tuple[str, ...] = (), tokenizer: Any = TOKENIZER) -> list[str]:
    """The text that is returned after each token, and at the end."""
    growing = TextStream(tokenizer, tokenizer("prompt")["input_ids"], stop)
    said = []
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        said.append(growing.add(token))
        if growing.is_stopped:
            break
    return [*said, growing.finish()]


@given(st.text(min_size=1, max_size=40))
def test_only_complete_characters_are_emitted(text):
    said = stream(text, tokenizer=BYTEWISE)
    assert "".join(said) == text.rstrip("\ufffd")  # U+FFFD may be text or an incomplete character
    assert all(part in text for part in said)


@given(
    st.sampled_from([BYTEWISE, SPACED]),
    st.text(LETTERS, min_size=1, max_size=9),
    st.text(LETTERS + "äß漢😀", max_size=60),
)
def test_a_completion_continues_the_text_of_its_prompt(tokenizer, prompt, text):
    first, *rest = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in ("a", text))
    ids = [*first, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    assert text_of(tokenizer, ids, rest[0]) == text
    whole = tokenizer.decode([*ids, *rest[0]], clean_up_tokenization_spaces=False)
    assert whole == "a" + prompt + text


@pytest.mark.parametrize("text", ["aaß漢漢😀ß", "漢" * 30, "😀ß漢" * 9])
@pytest.mark.parametrize("prompt", ["", "漢漢漢", "a😀😀"])
def test_a_context_never_begins_within_a_character(prompt, text):
    for tokenizer in (BYTEWISE, SPACED):
        before, after = (
            tokenizer(part, add_special_tokens=False)["input_ids"] for part in ("a" + prompt, text)
        )
        assert text_of(tokenizer, before, after) == text


@given(st.sampled_from([BYTEWISE, SPACED]), st.lists(st.integers(0, 255), max_size=40))
def test_a_whole_completion_has_the_text_of_its_stream_whatever_its_tokens(tokenizer, ids):
    growing = TextStream(tokenizer, [1], ())
    said = [growing.add(token) for token in ids]
    assert text_of(tokenizer, [1], ids) == "".join([*said, growing.finish()])


def test_a_last_end_token_has_no_text_though_it_is_not_special():
    a, b = TOKENIZER("ab")["input_ids"]
    assert text_of(TOKENIZER, [a], [b, b, a], {a}) == "bb"
    assert text_of(TOKENIZER, [a], [a, b], {a}) == "ab"
    assert text_of(TOKENIZER, [a], [a], {a}) == text_of(TOKENIZER, [a], []) == ""


def test_half_a_character_at_the_end_is_dropped():
    growing = TextStream(BYTEWISE, [1], ())
    ids = BYTEWISE("a😀")["input_ids"]
    assert "".join(growing.add(token) for token in ids[:-1]) + growing.finish() == "a"


def test_invalid_utf_8_is_not_held_back_forever():
    growing = TextStream(BYTEWISE, [1], ())
    (half,) = set(BYTEWISE("😀")["input_ids"][1:2])
    (letter,) = BYTEWISE("a")["input_ids"]
    said = [growing.add(token) for token in [half] * 9 + [letter]]
    assert said[-1].endswith("a")
    assert any(said[:-1])


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_never_leak(text, stops):
    said = "".join(stream(text, tuple(stops)))
    places = [text.find(stop) for stop in stops if stop in text]
    # The stop string that is complete first ends the text; of two, the one that begins first.
    ends = [min(text.find(stop) + len(stop) for stop in stops if stop in text)] if places else []
    whole = text[: ends[0]] if ends else text
    wanted = min((whole.find(s) for s in stops if s in whole), default=len(whole))
    assert said == whole[:wanted]


def test_text_is_emitted_as_soon_as_it_is_final():
    assert stream("abcd", ("bx",)) == ["a", "", "bc", "d", ""]
    assert stream("ab", ("bx",)) == ["a", "", "b"]


def test_spaces_between_words_survive_a_tokenizer_that_hides_them():
    core = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "?": 2}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    fast: Any = PreTrainedTokenizerFast
    growing = TextStream(fast(tokenizer_object=core), [0], ())
    assert [growing.add(1), growing.add(0)] == [" b", " a"]


def draws(sampling: Sampling, logits: list[float], count: int = 2000) -> list[float]:
    sampler = SequenceSampler(sampling, 0)
    chosen = torch.tensor([sampler.sample(torch.tensor(logits)) for _ in range(count)])
    return (chosen.bincount(minlength=len(logits)) / count).tolist()


LOGITS = [0.0, 1.0, 2.0, -1.0]


def test_tokens_are_drawn_by_their_probabilities():
    shares = draws(Sampling(seed=3), LOGITS)
    assert shares == pytest.approx(torch.tensor(LOGITS).softmax(0).tolist(), abs=0.04)
    shares = draws(Sampling(seed=3, temperature=0.5), LOGITS)
    assert shares == pytest.approx((torch.tensor(LOGITS) * 2).softmax(0).tolist(), abs=0.04)


def test_top_k_and_top_p_keep_the_most_likely_tokens():
    kept = torch.tensor([1.0, 2.0]).softmax(0).tolist()
    for sampling in (Sampling(top_k=2), Sampling(top_p=0.7), Sampling(top_k=3, top_p=0.75)):
        assert draws(sampling, LOGITS) == pytest.approx([0, *kept, 0], abs=0.04)
    assert draws(Sampling(top_p=0.01), LOGITS, 20) == [0, 0, 1, 0]


@pytest.mark.slow
def test_top_p_of_a_flat_distribution_is_exact():
    sampler = SequenceSampler(Sampling(top_p=0.9, seed=1), 0)
    chosen = {sampler.sample(torch.zeros(5000)) for _ in range(3000)}
    assert 1500 < len(chosen) <= 4500


@pytest.mark.parametrize("temperature", [0, 1e-30, 1e-6])
def test_temperature_0_is_greedy(temperature):
    assert draws(Sampling(temperature=temperature), [5.0, 100.0, 99.0], 20) == [0, 1, 0]


def test_penalties_lower_the_logits_of_generated_tokens():
    sampler = SequenceSampler(
        Sampling(temperature=0, frequency_penalty=0.4, presence_penalty=0.2), 0
    )
    logits = torch.tensor([1.0, 0.5, 0.0])
    # 1.0, then 0.4 against 0.5, then 0.4 against -0.1, then 0.0 against -0.1, then -0.4.
    assert [sampler.sample(logits) for _ in range(5)] == [0, 1, 0, 0, 2]
    assert logits.tolist() == [1.0, 0.5, 0.0]


def test_completions_of_one_seed_differ_and_repeat():
    logits = torch.zeros(100)

    def tokens(index: int) -> list[int]:
        sampler = SequenceSampler(Sampling(seed=5), index)
        return [sampler.sample(logits) for _ in range(10)]

    assert tokens(0) == tokens(0)
    assert tokens(0) != tokens(1)
