"""Infer jobs with several prompts, token ids, echo and log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import tiny
from hypothesis import given, settings, strategies as st
from odd_tokenizers import joining, spaced
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from warmd.jobs.engine.request import Request, Sampling, TokenLogprob
from warmd.jobs.engine.sequence import TextSequence
from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.infer.kind import run
from warmd.jobs.infer.options import InferSpec
from warmd.jobs.infer.token_texts import TokenTexts


@pytest.fixture(scope="module")
def model() -> Any:
    """One for all tests: an engine lives as long as its process."""
    return tiny.model(positions=128)


@pytest.fixture
def job(tmp_path: Path, model: Any) -> tiny.Surroundings:
    return tiny.surroundings(tmp_path / "job", model)


def answer(job: tiny.Surroundings, **options: Any) -> dict[str, Any]:
    if "prompts" in options:
        options["prompts"] = orjson.dumps(options["prompts"]).decode()
    spec = InferSpec.parse({"temperature": 0, "max_tokens": 5, **options})
    return run(spec, job.ctx)


def test_prompts_get_the_same_completions_in_a_batch_as_alone(job):
    texts = ["1+1=", "ab", "x" * 40]
    alone = [answer(job, prompt=text)["choices"][0]["text"] for text in texts]
    together = answer(job, prompts=texts)
    assert [choice["text"] for choice in together["choices"]] == alone
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
    assert together["usage"]["prompt_tokens"] == sum(map(len, texts))
    ids = [tiny.tokenizer()(text)["input_ids"] for text in texts]
    assert [choice["text"] for choice in answer(job, prompts=ids)["choices"]] == alone
    streamed = [""] * 3
    for event in job.of_type("text")[-100:]:
        streamed[event["index"]] = event["text"] or streamed[event["index"]]


def test_an_echoed_prompt_starts_the_text_and_its_events(job):
    plain = answer(job, prompt="1+1=")["choices"][0]["text"]
    job.events.clear()
    (choice,) = answer(job, prompt="1+1=", echo=True, logprobs=1)["choices"]
    assert choice["text"] == "1+1=" + plain
    assert "".join(event["text"] for event in job.of_type("text")) == choice["text"]
    entries = [entry for event in job.of_type("text") for entry in event["logprobs"]]
    assert entries == choice["logprobs"]
    assert "".join(entry["token"] for entry in entries) == choice["text"]
    assert (entries[0]["logprob"], entries[0]["top"]) == (None, None)
    assert all(len(entry["top"]) == 1 for entry in entries[1:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": "1"}, "prompts: must be a JSON list of 1 to 1024, got int"),
        ({"prompts": "["}, "prompts: must be a JSON list, got '['"),
        ({"prompts": "[]"}, "prompts: must be a JSON list of 1 to 1024, got 0"),
        ({"prompts": '["a", ""]'}, "prompts: [1] must be a text or token ids"),
        ({"prompts": "[[1, -1]]"}, "prompts: [0] must be a text or token ids"),
        ({"prompts": "[[true]]"}, "prompts: [0] must be a text or token ids"),
        ({"prompts": '["a"]', "prompt": "b"}, "prompt: must be given, or else messages, prompts"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: must go with echo, got 0"),
        ({"messages": '[{"role": "user", "content": "a"}]', "echo": True}, "echo: must go with"),
        ({"prompt": "a", "logprobs": 21}, "logprobs: must be an integer of at least 0 and at most"),
    ],
)
def test_wrong_prompts_are_refused_in_one_line(options, message):
    with pytest.raises(SpecError) as refused:
        InferSpec.parse(options)
    assert str(refused.value).startswith(message)


def test_an_end_token_that_is_not_special_has_no_text_in_the_logprobs(tmp_path):
    ending = tiny.model(positions=128)
    ids = tiny.tokenizer()("1+1=", return_tensors="pt")["input_ids"]
    likeliest = int(ending(ids).logits[0, -1].argmax())
    assert tiny.tokenizer().decode([likeliest], skip_special_tokens=True)
    ending.generation_config.eos_token_id = [2, likeliest]
    job = tiny.surroundings(tmp_path / "job", ending)
    (choice,) = answer(job, prompt="1+1=", echo=True, logprobs=2)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("1+1=", "stop")
    assert len(choice["logprobs"]) == 5
    assert "".join(entry["token"] for entry in choice["logprobs"]) == choice["text"]


JOINING, SPACED = joining(), spaced()


@settings(max_examples=400)
@given(
    st.sampled_from([JOINING, SPACED]),
    st.text("abcd e“é", min_size=1, max_size=30),
    st.lists(st.text("abcd e“é", min_size=1, max_size=4), max_size=3),
    st.integers(0, 3),
)
def test_the_tokens_of_the_logprobs_are_the_text_whatever_the_stop_string(
    tokenizer, text, stops, num_missing
):
    ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = tokens[: max(1, len(tokens) - num_missing)]  # the last character may be incomplete
    sampling = Sampling(temperature=0)
    request = Request(
        ids=ids, sampling=sampling, max_tokens=len(tokens), stop=tuple(stops), num_top=0
    )
    sequence = TextSequence(request, 0, None, tokenizer)
    for token in tokens:
        sequence.accept(token, frozenset(), TokenLogprob(token, -1.0))
        if sequence.finish_reason is not None:
            break
    texts, said, data = TokenTexts(tokenizer), "", b""
    while not request.pieces.empty():
        piece: Any = request.pieces.get()
        entries = texts.entries(piece.logprobs, piece.kept_bytes)
        said += piece.text
        data += b"".join(bytes(entry["bytes"]) for entry in entries)
        assert said.encode().startswith(data)  # no entry comes before its text
    assert piece.finish_reason is not None
    assert data == said.encode()


def test_the_tokens_of_a_stop_string_have_no_logprobs(job):
    asked: dict[str, Any] = {"prompt": "1+1=", "n": 2, "temperature": 1.0, "seed": 5}
    asked |= {"max_tokens": 60, "logprobs": 2}
    plain = answer(job, **asked)["choices"]
    for echoed in (False, True):
        job.events.clear()
        found = answer(job, **asked, echo=echoed, stop=[plain[0]["text"][20:22]])["choices"]
        assert found[0]["finish_reason"] == "stop"
        for choice in found:
            streamed = [e for e in job.of_type("text") if e["index"] == choice["index"]]
            assert "".join(event["text"] for event in streamed) == choice["text"]
            entries = [entry for event in streamed for entry in event.get("logprobs", [])]
            assert entries == choice["logprobs"]
            assert "".join(entry["token"] for entry in entries) == choice["text"]


def test_a_token_that_is_cut_has_the_rest_of_its_text():
    texts = TokenTexts(JOINING)
    (abc,) = JOINING("abc")["input_ids"]
    a, d = JOINING("ad")["input_ids"]
    found = (TokenLogprob(abc, -1.0, ((abc, -1.0), (a, -2.0))), TokenLogprob(d, -1.0))
    (entry,) = texts.entries(found, 1)
    assert (entry["token"], entry["bytes"]) == ("a", [97])
    assert [one["token"] for one in entry["top"]] == ["a", "a"]
    assert [one.get("name") for one in entry["top"]] == [None, f"a ({a})"]
    assert [one["token"] for one in texts.entries(found, None)] == ["abc", "d"]


def test_tokens_without_a_text_of_their_own_are_kept_apart():
    texts = TokenTexts(tiny.tokenizer(), ends=[7])
    seven = tiny.tokenizer().convert_ids_to_tokens(7)
    found = texts.entry(TokenLogprob(0, -3.0, ((1, -0.5), (2, -1.0), (7, -2.0), (0, -3.0))))
    assert found["token"] == ""
    assert [one["token"] for one in found["top"]] == [""] * 4
    assert [one.get("name") for one in found["top"]] == ["<bos>", "<eos>", seven, None]
    assert texts.entry(TokenLogprob(7, -1.0), is_prompt=True)["token"] == seven


def test_a_token_outside_the_vocabulary_fails_the_job(job):
    with pytest.raises(JobFailed, match="prompt: token 5000 is not among the"):
        answer(job, prompts=[[1, 5000]])


def test_the_parts_of_a_character_have_their_own_bytes():
    character = "é".encode()
    vocabulary = {chr(256 + n) if n < 33 else chr(n): n for n in (*range(33, 127), 97)}
    by_byte = {value: chr(value) for value in (*range(161, 173), *range(174, 256))}
    pieces = [by_byte[byte] for byte in character]
    vocabulary |= {piece: 200 + place for place, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=core))
    found = [texts.entry(TokenLogprob(200 + place, -1.0)) for place in range(len(pieces))]
    assert bytes(byte for entry in found for byte in entry["bytes"]) == character
    assert texts.entry(TokenLogprob(97, -1.0))["bytes"] == [97]
