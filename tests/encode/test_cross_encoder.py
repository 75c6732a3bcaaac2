"""Encode jobs with a query: scores are the model's label of each pair of query and text."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import cross_encoders
import numpy as np
import orjson
import pytest
import tiny
import torch
from safetensors.numpy import load_file

from warmd.configs.config import ModelConfig
from warmd.daemon.fork.models import WarmModels
from warmd.jobs.encode.cross_encoder import lengths
from warmd.jobs.encode.kind import run
from warmd.jobs.encode.options import EncodeSpec
from warmd.jobs.errors import JobFailed, SpecError

QUERY = "which number is it?"
TEXTS = [f"number {n}{' and more' * (n % 4)}" for n in range(12)]
LONG = "one two three " * 9

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


class Job:
    """A job on one model, in a run directory that stays."""

    def __init__(self, folder: Path, model: Any, tokenizer: Any, place: Path | None = None) -> None:
        self.made = tiny.surroundings(folder, model)
        models: Any = self.made.ctx.models
        models.tokenizer = tokenizer
        models.path = place or models.path

    def run(self, **options: Any) -> dict[str, Any]:
        return run(EncodeSpec.parse({"query": QUERY, **options}), self.made.ctx)

    def scores(self, **options: Any) -> list[float]:
        found: list[float] = self.run(**options)["scores"]
        return found


@pytest.fixture
def bert(tmp_path: Path) -> Job:
    return Job(tmp_path / "run", cross_encoders.model(), cross_encoders.tokenizer())


def test_a_score_is_the_sigmoid_of_the_head_on_the_pooled_first_token(bert):
    model, ids_of = cross_encoders.model(), cross_encoders.tokenizer().convert_tokens_to_ids
    query, text = ids_of(list(QUERY)), ids_of(list(TEXTS[3]))
    ids = torch.tensor([[1, *query, 2, *text, 2]])
    types = torch.tensor([[0] * (len(query) + 2) + [1] * (len(text) + 1)])
    hidden = model.bert.embeddings(input_ids=ids, token_type_ids=types)
    hidden = model.bert.encoder(hidden).last_hidden_state
    dense, head = model.bert.pooler.dense, model.classifier
    pooled = torch.tanh(dense.weight @ hidden[0, 0] + dense.bias)
    logit = (head.weight[0] * pooled).sum() + head.bias[0]
    expected = 1 / (1 + torch.exp(-logit))
    found = bert.run(text=TEXTS)
    assert found["scores"][3] == pytest.approx(float(expected), abs=1e-6)
    assert (found["activation"], found["rows"], found["cut"]) == ("sigmoid", len(TEXTS), 0)
    assert found["tokens"] == sum(len(QUERY) + len(text) + 3 for text in TEXTS)


@pytest.mark.parametrize("name", cross_encoders.MODELS)
def test_a_text_has_the_score_of_the_model_called_directly_also_in_a_batch(tmp_path, name):
    model, tokenizer = cross_encoders.model(name), cross_encoders.tokenizer(name)
    found = Job(tmp_path / "run", model, tokenizer).scores(text=TEXTS)
    assert len(set(found)) == len(TEXTS)
    for text, score in zip(TEXTS, found, strict=True):
        direct = model(**tokenizer(QUERY, text, return_tensors="pt")).logits[0, 0]
        assert score == pytest.approx(float(torch.sigmoid(direct)), abs=1e-6)


def test_a_decoder_without_a_padding_token_scores_one_pair_at_a_time(tmp_path):
    model, tokenizer = cross_encoders.model("llama"), cross_encoders.tokenizer("llama")
    padded = Job(tmp_path / "a", model, tokenizer).scores(text=TEXTS)
    model.config.pad_token_id = None
    alone = Job(tmp_path / "b", model, tokenizer).scores(text=TEXTS)
    np.testing.assert_allclose(padded, alone, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "stored", "activation"),
    [
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, {}, 0),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, {}, 0),
        ({"sentence_transformers": {"version": "5.1.0"}}, {}, 1),
        ({}, {"activation_fn": "torch.nn.modules.linear.Identity"}, 0),
        ({}, {"activation_fn": "torch.nn.modules.activation.Sigmoid"}, 1),
    ],
)
def test_a_folder_of_sentence_transformers_names_the_activation(
    tmp_path, settings, stored, activation
):
    step = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.Transformer"}
    (tmp_path / "modules.json").write_bytes(orjson.dumps([step]))
    (tmp_path / "config_sentence_transformers.json").write_bytes(orjson.dumps(stored))
    model = cross_encoders.model(**settings)
    job = Job(tmp_path / "run", model, cross_encoders.tokenizer(), tmp_path)
    assert job.run(text=["a"])["activation"] == ("identity", "sigmoid")[activation]
    score = job.scores(text=["a"])[0]
    logit = model(**cross_encoders.tokenizer()(QUERY, "a", return_tensors="pt")).logits[0, 0]
    wanted = torch.sigmoid(logit) if activation else logit
    assert score == pytest.approx(float(wanted), abs=1e-6)


# --- Long texts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("query", "text"), [(QUERY, LONG), (LONG, QUERY), (LONG, LONG[:-1]), (LONG[:-1], LONG)]
)
def test_long_pairs_are_cut_as_by_their_tokenizer(tmp_path, side, query, text):
    model, tokenizer = cross_encoders.model(), cross_encoders.tokenizer(side=side)
    job = Job(tmp_path / "run", model, tokenizer)
    found = job.run(query=query, text=[text, "a"])
    cut = tokenizer(query, text, truncation=True, max_length=64, return_tensors="pt")
    assert found["scores"][0] == pytest.approx(
        float(torch.sigmoid(model(**cut).logits[0, 0])), abs=1e-6
    )
    assert found["cut"] == 1 + (query != QUERY)
    (warning,) = job.made.of_type("warning")
    assert "of 2 passages have more than 64 tokens with the query" in warning["message"]


@pytest.mark.parametrize("room", [5, 6])
def test_the_longer_text_is_cut_first_as_by_tokenizers(room):
    tokenizer = cross_encoders.tokenizer()
    for first in range(1, 10):
        for second in range(1, 10):
            if first + second <= room:
                continue
            ids = tokenizer("1" * first, "2" * second, truncation=True, max_length=room + 3)
            kept = [ids.token_type_ids.count(kind) for kind in (0, 1)]
            assert lengths(first, second, room) == (kept[0] - 2, kept[1] - 1)


def test_without_truncation_a_longer_text_is_refused_by_its_number_and_its_length(bert):
    room = 64 - 3 - len(QUERY)
    bert.run(text=["1" * room], truncate=False)
    with pytest.raises(JobFailed, match=r"^input: \[1\] must have at most 64 tokens for demo, got"):
        bert.run(text=["1", "1" * (room + 1)], truncate=False)
    with pytest.raises(JobFailed, match=r"^query: must have at most 60 tokens for demo, got 61$"):
        bert.run(query="1" * 61, text=["1"], truncate=False)
    begun = time.perf_counter()
    for options in ({"text": ["1", "1" * 7_000_000]}, {"query": "1" * 7_000_000, "text": ["1"]}):
        with pytest.raises(JobFailed, match=r"^(input: \[1\]|query:) must have at most \d+ char"):
            bert.run(truncate=False, **options)
    assert time.perf_counter() - begun < 1


def test_passages_are_cut_to_their_own_length_also_without_truncation(bert):
    found = bert.run(text=[LONG, "one"], passage_length=7, truncate=False)
    assert found["scores"] == pytest.approx(bert.scores(text=[LONG[:7], "one"]), abs=1e-6)
    assert (found["cut"], found["tokens"]) == (1, 2 * (len(QUERY) + 3) + 7 + 3)
    with pytest.raises(JobFailed, match=r"^input: \[0\] must have at most 64 tokens"):
        bert.run(text=[LONG], passage_length=60, truncate=False)


# --- Files ----------------------------------------------------------------------------------------


def test_every_output_format_has_the_same_scores(bert, tmp_path):
    scores = np.array(bert.scores(text=TEXTS), np.float32)
    for suffix in (".npz", ".safetensors", ".jsonl"):
        path = tmp_path / f"scores{suffix}"
        assert bert.run(text=TEXTS, output=str(path))["output"] == str(path)
    rows = [orjson.loads(line) for line in (tmp_path / "scores.jsonl").read_bytes().splitlines()]
    assert [row["id"] for row in rows] == [str(n) for n in range(len(TEXTS))]
    np.testing.assert_array_equal(np.array([row["score"] for row in rows], np.float32), scores)
    with np.load(tmp_path / "scores.npz") as arrays:
        np.testing.assert_array_equal(arrays["scores"], scores)
    np.testing.assert_array_equal(load_file(tmp_path / "scores.safetensors")["scores"], scores)


def test_scores_for_another_query_are_not_reused(bert, monkeypatch):
    from warmd.jobs.encode import kind

    def broken(*_: Any) -> Any:
        raise RuntimeError("killed here")

    with monkeypatch.context() as patched:
        patched.setattr(kind, "_deliver", broken)
        with pytest.raises(RuntimeError, match="killed here"):
            bert.run(text=TEXTS)
    other = bert.scores(query="another?", text=TEXTS)
    assert "begun again" in bert.made.of_type("warning")[0]["message"]
    assert other != bert.scores(text=TEXTS)


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query": ""}, "query: must be a text that is not empty"),
        ({"passage_length": 3}, "passage_length: must go with query"),
        ({"query": "a", "dtype": "int8"}, "dtype: must not be int8 with query"),
        ({"query": "a", "normalize": True}, "normalize: must not go with query"),
        ({"query": "a", "dimensions": 3}, "dimensions: must not go with query"),
        ({"query": "a", "pooling": "cls"}, "pooling: must not go with query"),
    ],
)
def test_options_without_a_meaning_are_refused_by_name(options, message):
    with pytest.raises(SpecError, match=message):
        EncodeSpec.parse({"text": ["a"], **options})


CLASSIFIER = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        ({}, {**CLASSIFIER, "id2label": {"0": "a"}}, "must be no cross-encoder for embeddings"),
        ({"query": "a"}, {**CLASSIFIER, "id2label": {"0": "a", "1": "b"}}, "must have one label"),
        ({"query": "a"}, CLASSIFIER, "must have one label to score texts .*, got bert of 2"),
        (
            {"query": "a"},
            {"model_type": "bert", "architectures": ["BertModel"]},
            r"must be a cross-encoder .*, got bert \(BertModel\)",
        ),
    ],
)
def test_a_model_of_another_kind_is_refused_at_submission(options, config, message):
    spec = EncodeSpec.parse({"text": ["a"], **options})
    with pytest.raises(SpecError, match=f"^model: {message}"):
        spec.check_inputs(config)


def test_a_loaded_model_of_another_kind_is_refused(bert, tmp_path):
    with pytest.raises(JobFailed, match=r"^model: must be no cross-encoder for embeddings"):
        run(EncodeSpec.parse({"text": ["a"]}), bert.made.ctx)
    with pytest.raises(JobFailed, match=r"^model: must be a cross-encoder"):
        Job(tmp_path / "a", tiny.model(), tiny.tokenizer()).run(text=["a"])
    two = cross_encoders.model(num_labels=2)
    with pytest.raises(JobFailed, match=r"^model: must have one label .*, got bert of 2"):
        Job(tmp_path / "b", two, cross_encoders.tokenizer()).run(text=["a"])


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        ({"modules.json": [{"type": "a.Pooling", "path": "p"}]}, {}, "Transformer alone"),
        ({"modules.json": [{"type": "a.LogitScore", "path": ""}]}, {}, "got step 'LogitScore'"),
        (
            {"config_sentence_transformers.json": {"default_prompt_name": "q"}, "modules.json": []},
            {},
            "not supported for scores: default_prompt_name 'q'",
        ),
        (
            {"sentence_bert_config.json": {"modality_config": {"message": {}}}, "modules.json": []},
            {},
            "not supported for scores: modality_config",
        ),
        ({}, {"sentence_transformers": {"activation_fn": "os.system"}}, "got 'os.system'"),
        ({}, {"sentence_transformers": {"activation_fn": [1]}}, "torch.nn.Sigmoid, got a list"),
        ({}, {"type_vocab_size": 1}, "type_vocab_size of config.json must be above 1"),
    ],
)
def test_what_would_change_the_scores_is_refused_by_name(tmp_path, files, settings, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(orjson.dumps(content))
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "config.json").write_text('{"pooling_mode": "mean"}')
    model = cross_encoders.model(**settings)
    job = Job(tmp_path / "run", model, cross_encoders.tokenizer(), tmp_path)
    with pytest.raises(JobFailed, match=f"^model: .*{message}"):
        job.run(text=["a"])


def test_a_score_with_nan_fails_the_job(tmp_path):
    model = cross_encoders.model()
    model.classifier.bias[0] = float("nan")
    with pytest.raises(JobFailed, match="model: NaN or Inf in its score of 0"):
        Job(tmp_path / "run", model, cross_encoders.tokenizer()).run(text=["one"])


# --- As warm models -------------------------------------------------------------------------------


def test_a_cross_encoder_is_a_warm_model_by_its_class_and_without_its_head_by_its_task(tmp_path):
    folder = cross_encoders.save(tmp_path / "model")
    config = ModelConfig(name="demo", path=str(folder))
    warm = WarmModels(10**9).ensure(config, folder, in_use=()).warm
    found = Job(tmp_path / "a", warm.model, warm.tokenizer, folder).scores(text=TEXTS)
    direct = Job(tmp_path / "b", cross_encoders.model(), cross_encoders.tokenizer())
    assert found == pytest.approx(direct.scores(text=TEXTS), abs=1e-6)
    body = WarmModels(10**9).ensure(replace(config, task="embedding"), folder, in_use=()).warm
    job = Job(tmp_path / "c", body.model, body.tokenizer)
    vectors = run(EncodeSpec.parse({"text": ["one"]}), job.made.ctx)["embeddings"]
    assert np.shape(vectors) == (1, 16)
