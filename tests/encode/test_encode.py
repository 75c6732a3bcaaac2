"""Encode jobs: vectors depend only on the text, not on batching, output format or restarts."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import tiny
import torch
from breadth import mostly_slow
from safetensors import safe_open
from shell import warmd
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from warmd.configs.config import ModelConfig, WorkerConfig
from warmd.daemon.fork.models import WarmModels
from warmd.jobs import spec_class
from warmd.jobs.codegraph.encoder import CodeGraphConfig, CodeGraphEncoder
from warmd.jobs.codegraph.sequences import Role, train_tokenizer
from warmd.jobs.context import WarmModel
from warmd.jobs.encode import embedder, kind
from warmd.jobs.encode.embedder import Embedder
from warmd.jobs.encode.kind import run
from warmd.jobs.encode.options import FORMATS, EncodeSpec
from warmd.jobs.encode.passages import Passage, from_sources
from warmd.jobs.encode.text_encoder import batches
from warmd.jobs.errors import JobFailed, SpecError, Stopped
from warmd.jobs.mlm.corpus import as_pretrained

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "initializer_range": 0.2,
}
SPECIAL: dict[str, Any] = {
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
MODULE = '''
import json


def double(number: int) -> int:
    """Twice the number."""
    return add(number, number)


class Store:
    limit = {n}

    def value(self) -> int:
        return double(self.limit)
'''
TEXTS = [f"number {n}, then {n + 1}{' and more' * (n % 7)}" for n in range(20)]


def make(name: str, positions: int = 64) -> Any:
    torch.manual_seed(0)
    models: dict[str, Any] = {
        "code": lambda: CodeGraphEncoder(CodeGraphConfig(**SIZES)),
        "bert": lambda: BertForMaskedLM(BertConfig(max_position_embeddings=positions, **SIZES)),
        "roberta": lambda: RobertaForMaskedLM(
            RobertaConfig(
                max_position_embeddings=positions + 2, pad_token_id=0, type_vocab_size=1, **SIZES
            )
        ),
        "modernbert": lambda: ModernBertForMaskedLM(
            ModernBertConfig(max_position_embeddings=positions, **SIZES, **SPECIAL)
        ),
        "distilbert": lambda: DistilBertModel(
            DistilBertConfig(
                vocab_size=300, dim=16, n_layers=2, n_heads=2, hidden_dim=32, initializer_range=0.2
            )
        ),
    }
    model = models[name]()
    for parameter_name, parameter in model.named_parameters():
        if "relation_bias" in parameter_name:
            torch.nn.init.normal_(parameter)
    return model.requires_grad_(False).eval()


pytestmark = pytest.mark.usefixtures("like_a_work_horse")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return as_pretrained(train_tokenizer([*TEXTS, MODULE], 300))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for n in range(3):
        (folder / f"module{n}.py").write_text(MODULE.format(n=n))
    (folder / "broken.py").write_text("def (")
    return folder


OTHERS = pytest.mark.nightly(
    part="oracles", catches="an encoder of a kind whose vectors differ in a batch"
)


@pytest.fixture(
    scope="module",
    params=[
        *mostly_slow(("code", "bert", "modernbert"), but=("code", "bert")),
        *(pytest.param(kind, marks=OTHERS) for kind in ("roberta", "distilbert")),
    ],
)
def model(request: pytest.FixtureRequest) -> Any:
    return make(request.param)


class Job:
    """A job on one model, in a run directory that stays."""

    def __init__(self, folder: Path, model: Any, tokenizer: Any) -> None:
        self.made = tiny.surroundings(folder, model)
        self.made.ctx.models.tokenizer = tokenizer  # type: ignore[attr-defined]

    def run(self, **options: Any) -> dict[str, Any]:
        return run(EncodeSpec.parse(options), self.made.ctx)

    def vectors(self, **options: Any) -> Any:
        return np.array(self.run(**options)["embeddings"], np.float32)


@pytest.fixture
def job(tmp_path: Path, model: Any, tokenizer: Any) -> Job:
    return Job(tmp_path / "run", model, tokenizer)


@pytest.fixture
def code_job(tmp_path: Path, tokenizer: Any) -> Job:
    return Job(tmp_path / "run", make("code"), tokenizer)


def write_rows(path: Path, texts: list[str]) -> Path:
    path.write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts))
    return path


# --- What a vector is -----------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", mostly_slow(["mean", "cls"], but=["mean"]))
def test_a_batch_of_mixed_lengths_gives_the_vectors_of_single_texts_in_order(job, pooling):
    together = job.vectors(text=TEXTS, pooling=pooling)
    for text, vector in zip(TEXTS, together, strict=True):
        alone = job.vectors(text=[text], pooling=pooling, batch_size=1)[0]
        np.testing.assert_allclose(vector, alone, rtol=1e-5, atol=2e-6)
    assert len({tuple(vector) for vector in together.tolist()}) == len(TEXTS)


def test_vectors_equal_those_of_the_model_called_directly(job, model, tokenizer):
    text = TEXTS[5]
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    if isinstance(model, CodeGraphEncoder):
        roles = torch.full_like(ids, Role.CODE)
        roles[0, [0, -1]] = Role.SPECIAL
        hidden = model(ids, role_ids=roles).last_hidden_state[0]
    else:
        hidden = model.base_model(ids).last_hidden_state[0]
    expected = {"mean": hidden.mean(0), "cls": hidden[0]}
    for pooling, vector in expected.items():
        found = job.vectors(text=[text], pooling=pooling)[0]
        np.testing.assert_allclose(found, vector.numpy(), rtol=1e-5, atol=2e-6)
    unit = job.vectors(text=[text], normalize=True)[0]
    mean = expected["mean"].numpy()
    np.testing.assert_allclose(unit, mean / np.linalg.norm(mean), rtol=1e-5, atol=2e-6)


def test_token_ids_are_encoded_as_they_are(job, model, tokenizer):
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    given = orjson.dumps(ids).decode()
    if isinstance(model, CodeGraphEncoder):
        with pytest.raises(JobFailed, match="tokens: must go with a text encoder"):
            job.run(tokens=given)
        return
    found = job.run(tokens=given, normalize=True)
    assert found["tokens"] == sum(map(len, ids))
    np.testing.assert_allclose(
        found["embeddings"], job.vectors(text=TEXTS, normalize=True), rtol=1e-5, atol=2e-6
    )
    with pytest.raises(JobFailed, match="is not among the 300"):
        job.run(tokens="[[1, 300]]")
    with pytest.raises(JobFailed, match=r"input: \[0\] must have at most 4 tokens"):
        job.run(tokens="[[1, 5, 5, 5, 2]]", truncate=False, max_length=4)


def test_dimensions_are_cut_before_the_length_becomes_one(job):
    whole = job.vectors(text=TEXTS, normalize=False)
    result = job.run(text=TEXTS, normalize=True, dimensions=5)
    cut = whole[:, :5] / np.linalg.norm(whole[:, :5], axis=1, keepdims=True)
    np.testing.assert_allclose(result["embeddings"], cut, rtol=1e-5, atol=2e-6)
    assert result["width"] == 5
    with pytest.raises(JobFailed, match="dimensions: must be at most 16 for this model, got 17"):
        job.run(text=TEXTS, dimensions=17)


# The settings of sentence-transformers 2 to 4, and of 5.
POOLED: list[tuple[dict[str, Any], bool, str]] = [
    ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, True, "cls"),
    ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}, False, "mean"),
    ({"pooling_mode_lasttoken": True}, True, "last"),
    ({"pooling_mode": "lasttoken", "include_prompt": True}, False, "last"),
    ({"pooling_mode": ["mean"]}, True, "mean"),
]


def modules(folder: Path, pooling: dict[str, Any], names: list[str]) -> Path:
    """Write the files of sentence-transformers."""
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "1_Pooling" / "config.json").write_bytes(orjson.dumps(pooling))
    kinds = {"Transformer": "", "Pooling": "1_Pooling"}
    steps = [
        {
            "idx": number,
            "name": str(number),
            "path": kinds.get(name, f"{number}_{name}"),
            "type": f"sentence_transformers.models.{name}",
        }
        for number, name in enumerate(names)
    ]
    (folder / "modules.json").write_bytes(orjson.dumps(steps))
    return folder


@pytest.mark.parametrize(("pooling", "is_normalized", "name"), POOLED)
def test_a_folder_of_sentence_transformers_says_how_it_is_pooled(
    tmp_path, tokenizer, pooling, is_normalized, name
):
    steps = ["Transformer", "Pooling", *(["Normalize"] if is_normalized else [])]
    folder = modules(tmp_path / "model", pooling, steps)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    (folder / "config_sentence_transformers.json").write_text('{"default_prompt_name": "query"}')
    job = Job(tmp_path / "run", make("bert"), tokenizer)
    job.made.ctx.models.path = folder  # type: ignore[attr-defined]
    found = job.run(text=TEXTS)
    assert (found["pooling"], found["normalize"]) == (name, is_normalized)
    given = job.vectors(text=TEXTS, pooling=name, normalize=is_normalized, max_length=9)
    np.testing.assert_array_equal(np.array(found["embeddings"], np.float32), given)
    (begin, _) = job.made.of_type("begin")
    assert (begin["pooling"], begin["max_length"]) == (name, 9)
    warned = [event["message"] for event in job.made.of_type("warning")]
    assert any("default_prompt_name 'query'" in message for message in warned)


def test_the_last_token_is_that_of_each_text(job):
    together = job.vectors(text=TEXTS, pooling="last")
    for text, vector in zip(TEXTS, together, strict=True):
        alone = job.vectors(text=[text], pooling="last")[0]
        np.testing.assert_allclose(vector, alone, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("pooling", "steps", "problem"),
    [
        ({"pooling_mode_max_tokens": True}, ["Transformer", "Pooling"], "pooling pooling_mode_max"),
        ({"pooling_mode": ["cls", "mean"]}, ["Transformer", "Pooling"], "pooling cls and mean"),
        ({"pooling_mode": "mean"}, ["Transformer", "Pooling", "Dense"], "step 'Dense'"),
    ],
)
def test_what_a_folder_has_and_warmd_has_not_is_named(tmp_path, tokenizer, pooling, steps, problem):
    job = Job(tmp_path / "run", make("bert"), tokenizer)
    job.made.ctx.models.path = modules(tmp_path / "model", pooling, steps)  # type: ignore[attr-defined]
    with pytest.raises(JobFailed, match=f"pooling: must be given, .* supported: {problem}"):
        job.run(text=["one"])
    job.run(text=["one"], pooling="mean")


@pytest.mark.parametrize("mode", [5, {"a": 1}, [["mean"]], None])
def test_a_pooling_of_another_type_is_named(tmp_path, tokenizer, mode):
    job = Job(tmp_path / "run", make("bert"), tokenizer)
    folder = modules(tmp_path / "model", {"pooling_mode": mode}, ["Transformer", "Pooling"])
    job.made.ctx.models.path = folder  # type: ignore[attr-defined]
    with pytest.raises(JobFailed, match=r"model: config\.json: pooling_mode must be text"):
        job.run(text=["one"])


@pytest.mark.parametrize("damaged", ["{}", "[1]", '[{"type": "a.Pooling", "path": "../x"}]', "["])
def test_a_damaged_list_of_modules_is_named(tmp_path, tokenizer, damaged):
    job = Job(tmp_path / "run", make("bert"), tokenizer)
    (tmp_path / "modules.json").write_text(damaged)
    job.made.ctx.models.path = tmp_path  # type: ignore[attr-defined]
    with pytest.raises(JobFailed, match=r"model: modules\.json: "):
        job.run(text=["one"])
    steps = '[{"type": "a.Pooling", "path": "a\\u0000"}]'
    (tmp_path / "modules.json").write_text(steps)
    with pytest.raises(JobFailed, match=r"model: modules\.json: path must be the name of a folder"):
        job.run(text=["one"])


def test_long_texts_are_truncated_and_reported(job):
    result = job.run(text=["one two three " * 40, "one"], max_length=16)
    assert (result["rows"], result["cut"]) == (2, 1)
    assert result["tokens"] < 16 + 16
    whole = job.vectors(text=["one two three " * 40], max_length=16)
    np.testing.assert_allclose(whole[0], result["embeddings"][0], rtol=1e-5, atol=2e-6)
    assert [event["message"] for event in job.made.of_type("warning")] == [
        "max_length: 1 of 2 passages have more than 16 tokens; the others of their tokens are left "
        "out",
        "max_length: 1 of 1 passages have more than 16 tokens; the others of their tokens are left "
        "out",
    ]


def test_without_truncation_a_longer_text_is_refused_by_its_number_and_its_length(job):
    job.run(text=["one"] * 3, truncate=False, max_length=16)
    wanted = r"^input: \[1\] must have at most 16 tokens for \w+, got \d\d$"
    with pytest.raises(JobFailed, match=wanted):
        job.run(text=["one", "one two three " * 4], truncate=False, max_length=16)
    wanted = r"^input: \[2\] must have at most \d+ characters \(16 positions of .*, got 7000000$"
    begun = time.perf_counter()
    with pytest.raises(JobFailed, match=wanted):
        job.run(text=["one", "two", "word   " * 1_000_000], truncate=False, max_length=16)
    assert time.perf_counter() - begun < 1


@pytest.mark.parametrize("side", mostly_slow(["right", "left"], but=["right"]))
def test_a_long_text_is_cut_as_by_its_tokenizer_but_not_tokenized_as_a_whole(tokenizer, side):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.truncation_side = side
    model = make("bert")
    warm = WarmModel(name="m", path=Path("m"), model=model, tokenizer=tokenizer)
    embedder = Embedder(
        warm, pooling="mean", normalize=False, max_length=64, is_int8=False, device="cpu"
    )
    texts = [
        "".join(f"def number{n}(): return {n}\n" for n in range(3000)),
        "short",
    ]
    if side == "right":  # the last tokens of such words depend on their first ones
        blanks = " " * 50_000
        texts += ["a" * 100_000, f"{blanks}{'one two ' * 40}{blanks}{'three four ' * 40}{blanks}"]
    passages = [Passage(str(n), text) for n, text in enumerate(texts)]
    rows = embedder.rows(passages)
    assert tokenizer.backend_tokenizer.truncation is None  # a setting that others would wait for
    for text, row in zip(texts, rows, strict=True):
        assert row.ids.tolist() == tokenizer(text, truncation=True, max_length=64)["input_ids"]
        assert row.is_cut == (text != "short")
    begun = time.perf_counter()
    embedder.rows([Passage("0", "word " * 1_400_000)])
    assert time.perf_counter() - begun < 1


def test_embeddings_equal_those_with_torchs_kernels_within_rounding(code_job, monkeypatch):
    from contextlib import nullcontext

    fast = code_job.vectors(text=TEXTS)
    monkeypatch.setattr(embedder, "fast_kernels", nullcontext)
    np.testing.assert_allclose(fast, code_job.vectors(text=TEXTS), rtol=1e-5, atol=2e-6)


def test_int8_vectors_are_close_and_report_their_deviation(job):
    exact = job.vectors(text=TEXTS)
    result = job.run(text=TEXTS, dtype="int8")
    found = np.array(result["embeddings"])
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(exact, axis=1)
    cosines = (found * exact).sum(1) / norms
    assert cosines.min() > 0.99
    assert not np.array_equal(found, exact)
    assert result["int8"]["rows"] == 8
    assert result["int8"]["cosine_min"] == pytest.approx(cosines.min(), abs=0.01)
    assert "int8" not in job.run(text=TEXTS)
    other = job.run(text=TEXTS[:1], dtype="int8")["int8"]  # of its own vectors
    assert other["rows"] == 1
    assert other["cosine_min"] == other["cosine_mean"]


# --- Code -----------------------------------------------------------------------------------------


def test_python_code_gives_a_vector_for_each_module_class_and_function(code_job, sources):
    result = code_job.run(input=str(sources), max_length=48)
    one = [
        "module0",
        "module0.double",
        "module0.Store",
        "module0.Store.value",
    ]
    assert sorted(i for i in result["ids"] if i.startswith("module0")) == sorted(one)
    assert result["rows"] == 12
    skipped, cut = (event["message"] for event in code_job.made.of_type("warning"))
    assert "broken.py" in skipped
    assert cut.startswith("max_length: ")
    double = "def double(number: int) -> int:"
    (first,) = (i for i, name in enumerate(result["ids"]) if name == "module1.double")
    passages = from_sources(sources, chains=None, on_skip=lambda *_: None, check_stop=lambda: None)
    assert passages[first].text.startswith(double)
    again = code_job.vectors(text=[passages[first].text], max_length=48)
    np.testing.assert_allclose(again[0], result["embeddings"][first], rtol=1e-5, atol=2e-6)


def test_graph_walks_are_added_as_in_training(code_job, sources):
    options = {"input": str(sources / "module0.py"), "max_length": 64}
    plain, walked = code_job.run(**options), code_job.run(chains=True, **options)
    assert plain["ids"] == walked["ids"]
    assert walked["tokens"] > plain["tokens"]
    difference = np.abs(np.array(plain["embeddings"]) - np.array(walked["embeddings"])).max(1)
    assert (difference > 1e-3).all()
    one_by_one = code_job.run(chains=True, batch_size=1, **options)
    np.testing.assert_allclose(one_by_one["embeddings"], walked["embeddings"], rtol=1e-5, atol=2e-6)


def test_a_trained_encoder_gets_at_most_its_training_length(tmp_path, tokenizer):
    model = make("code")
    model.config.trained_length = 24
    job = Job(tmp_path / "run", model, tokenizer)
    result = job.run(text=["one two three " * 40])
    assert (result["tokens"], result["cut"]) == (24, 1)


# --- Files and restarts ---------------------------------------------------------------------------


def read_output(path: Path) -> Any:
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return arrays["ids"].tolist(), arrays["embeddings"], arrays["tokens"].tolist()
    if path.suffix == ".safetensors":
        with safe_open(path, "np") as file:
            ids = orjson.loads(file.metadata()["ids"])
            return ids, file.get_tensor("embeddings"), file.get_tensor("tokens").tolist()
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    vectors = np.array([row["embedding"] for row in rows], np.float32)
    return [row["id"] for row in rows], vectors, [row["tokens"] for row in rows]


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_output_format_has_the_same_vectors(code_job, tmp_path, suffix):
    expected = code_job.run(text=TEXTS)
    output = tmp_path / f"out{suffix}"
    result = code_job.run(text=TEXTS, output=str(output))
    assert result["output"] == str(output)
    assert "embeddings" not in result
    ids, vectors, tokens = read_output(output)
    assert ids == expected["ids"] == [str(n) for n in range(len(TEXTS))]
    np.testing.assert_array_equal(vectors, np.array(expected["embeddings"], np.float32))
    assert sum(tokens) == expected["tokens"]
    assert [path.name for path in tmp_path.iterdir() if path.name != "run"] == [output.name]


def test_many_vectors_go_to_a_file_in_the_run_directory(code_job, tmp_path):
    texts = [f"number {n}" for n in range(kind.MOST_NUMBERS // SIZES["hidden_size"] + 1)]
    result = code_job.run(input=str(write_rows(tmp_path / "rows.jsonl", texts)))
    assert result["output"] == str(tmp_path / "run" / "embeddings.npz")
    assert read_output(Path(result["output"]))[1].shape == (len(texts), SIZES["hidden_size"])


def test_records_keep_their_ids(code_job, tmp_path):
    rows = [{"text": "one", "id": "a"}, {"text": "two", "id": 7}, {"text": "three"}]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    assert code_job.run(input=str(path))["ids"] == ["a", "7", "2"]


def test_what_is_not_encoded_is_counted_in_the_begin_event(code_job, tmp_path, tokenizer, sources):
    job = Job(tmp_path / "bert", make("bert"), tokenizer)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "one", "mark": 3}\n\n \n{"text": "two"}\n')
    job.run(input=str(path))
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a.txt", "._a.txt", "b.pdf"):
        (folder / name).write_text("words")
    job.run(input=str(folder))
    job.run(text=["one"])
    assert [event["left_out"] for event in job.made.of_type("begin")] == [
        "blank lines: 2; columns (records): mark (1)",
        "files: 1 hidden (._a.txt); 1 of other types (b.pdf)",
        None,
    ]
    shutil.copytree(sources, tmp_path / "code")
    shutil.copytree(sources, tmp_path / "code" / "tests")
    code_job.run(input=str(tmp_path / "code"))
    [begin] = [event for event in code_job.made.of_type("begin") if event["left_out"]]
    assert begin["left_out"] == "files: 1 folders of tests or packages (tests/)"


def test_a_killed_job_resumes_after_the_last_record(tmp_path, tokenizer, monkeypatch):
    expected = Job(tmp_path / "whole", make("code"), tokenizer).vectors(text=TEXTS, batch_size=2)
    job = Job(tmp_path / "run", make("code"), tokenizer)
    events = job.made.of_type
    monkeypatch.setattr(kind, "EVENT_S", 0.0)  # an event after each batch
    pid = os.fork()
    if pid == 0:

        def emit(type: str, /, **fields: Any) -> None:
            if type == "progress" and fields["done"] >= 5:
                os.kill(os.getpid(), signal.SIGKILL)

        run(EncodeSpec.parse({"text": TEXTS, "batch_size": 2}), replace(job.made.ctx, emit=emit))
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    journal = tmp_path / "run" / "vectors.bin"
    with journal.open("ab") as file:
        file.write(b"half a record")
    found = job.vectors(text=TEXTS, batch_size=2)
    assert events("begin")[0]["done"] in (5, 6)
    assert [event["done"] for event in events("progress")][-1] == len(TEXTS)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)
    assert not journal.exists()


def test_a_job_of_an_earlier_version_continues_its_journal(code_job):
    """Earlier versions call the native dtype "model", in the spec and in the journal's identity."""
    spec = EncodeSpec.parse({"text": TEXTS, "dtype": "model"})
    assert spec.dtype == "native"
    options = ["mean", False, False, None, "model"]
    warm = code_job.made.ctx.models.take("demo")
    made = Embedder(warm, max_length=None, is_int8=False, device="cpu")
    assert orjson.loads(kind._identity(spec, warm, made))[-1] == options


def test_vectors_of_another_input_are_not_reused(code_job, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", TEXTS)
    code_job.made.stop.set()
    with pytest.raises(Stopped):
        code_job.run(input=str(path))
    code_job.made.stop.clear()
    write_rows(path, TEXTS[::-1])
    assert code_job.vectors(input=str(path)).shape == (20, 16)
    assert "begun again" in code_job.made.of_type("warning")[0]["message"]
    assert code_job.made.of_type("begin")[-1]["done"] == 0


def test_batches_of_long_texts_have_no_more_tokens_than_those_of_usual_ones():
    found = list(batches([100_000, 4096, 4096, 4096, 512], 16))
    assert found == [[0], [1, 2], [3], [4]]


def test_batches_have_similar_lengths_and_contain_every_text_once():
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 512, 2000).tolist()
    found = list(batches(lengths, 16))
    assert sorted(row for batch in found for row in batch) == list(range(2000))
    assert max(map(len, found)) == 16
    computed = sum(len(batch) * max(lengths[row] for row in batch) for batch in found)
    assert computed < 1.03 * sum(lengths)
    longest = [max(lengths[row] for row in batch) for batch in found]
    assert longest == sorted(longest, reverse=True)


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "text: must be given, or else input or tokens, got none"),
        ({"text": ["a"], "input": "b"}, "text: must be given, .*, got text and input"),
        ({"tokens": "[1]"}, "tokens: must be a JSON list of lists of token ids, none of them emp"),
        ({"tokens": "[[]]"}, "tokens: must be a JSON list of lists"),
        ({"tokens": "[[true]]"}, "tokens: must be a JSON list of lists"),
        ({"text": ["a"], "output": "b.csv"}, "output: must end in .jsonl"),
        ({"text": ["a"], "chains": True}, "chains: must go with input, got true"),
        ({"text": ["a"], "pooling": "max"}, "pooling: must be one of auto, mean, cls, last"),
    ],
)
def test_wrong_options_are_refused_by_name(options, message):
    with pytest.raises(SpecError, match=message):
        EncodeSpec.parse(options)


def test_inputs_are_checked_at_the_command_line(tmp_path, sources):
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{"txt": "two"}\n')
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "folder.npz").mkdir()
    os.mkfifo(tmp_path / "pipe.npz")
    code, bert = (
        {"model_type": "code_graph"},
        {"model_type": "bert", "max_position_embeddings": 64, "hidden_size": 16},
    )
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"input": str(tmp_path / "rows.jsonl")}, bert, r"input: .*rows.jsonl, line 2: must be"),
        ({"input": str(tmp_path / "empty.txt")}, bert, "input: must hold something"),
        ({"input": str(tmp_path / "nowhere")}, bert, "input: must be a file or a folder"),
        ({"input": str(sources), "chains": True}, bert, "chains: must go with a code-graph"),
        ({"text": ["a"], "max_length": 65}, bert, "max_length: must be at most 64"),
        ({"text": ["a"], "dimensions": 17}, bert, "dimensions: must be at most 16"),
        ({"text": ["a"], "output": str(tmp_path / "no" / "a.npz")}, code, "output: must be in a"),
        (
            {"text": ["a"], "output": str(tmp_path / "folder.npz")},
            code,
            "output: must be a file or",
        ),
        ({"text": ["a"], "output": str(tmp_path / "pipe.npz")}, code, "output: must be a file or"),
        ({"input": str(tmp_path / "pipe.npz")}, code, "input: must be a regular file"),
    ]
    for options, config, message in cases:
        with pytest.raises(SpecError, match=message):
            EncodeSpec.parse(options).check_inputs(config)


def test_a_text_without_tokens_is_named(tmp_path):
    job = Job(tmp_path / "run", make("bert"), tiny.tokenizer())
    with pytest.raises(JobFailed, match="input: 1 has no tokens"):
        job.run(text=["one", ""])
    with pytest.raises(JobFailed, match="pooling: the tokenizer"):
        job.run(text=["one"], pooling="cls")


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_vector_with_nan_or_inf_fails_the_job(tmp_path, tokenizer, broken):
    model = make("bert")
    model.base_model.embeddings.LayerNorm.weight[0] = broken
    with pytest.raises(JobFailed, match="model: NaN or Inf in its embedding of 0"):
        Job(tmp_path / "run", model, tokenizer).run(text=["one"], normalize=False)


# --- As warm models -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], but=["float32"]))
def test_a_trained_encoder_is_a_warm_model_and_encodes(tmp_path, tokenizer, dtype):
    make("code").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = ModelConfig(name="demo", path=str(tmp_path), dtype=dtype)
    loaded = WarmModels(10**9).ensure(config, tmp_path, in_use=())
    assert isinstance(loaded.warm.model, CodeGraphEncoder)
    assert isinstance(loaded.warm, WarmModel)
    found = Job(tmp_path / "a", loaded.warm.model, loaded.warm.tokenizer).vectors(text=TEXTS)
    exact = Job(tmp_path / "b", make("code"), tokenizer).vectors(text=TEXTS)
    tolerance = 2e-6 if dtype == "float32" else 0.05
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=tolerance)


def test_a_model_that_was_saved_without_a_head_is_loaded_without_one(tmp_path, tokenizer):
    make("distilbert").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = ModelConfig(name="demo", path=str(tmp_path))
    warm = WarmModels(10**9).ensure(config, tmp_path, in_use=()).warm
    assert type(warm.model) is type(AutoModel.from_pretrained(tmp_path))


@pytest.mark.nightly(
    part="oracles", catches="a trained encoder that the daemon cannot load, train on or encode with"
)
def test_an_encoder_that_a_job_has_trained_is_loaded_trained_on_and_encoded_with(
    make_daemon, sources, tmp_path
):
    workers = (
        WorkerConfig(name="train-0", queue="train", threads=1),
        WorkerConfig(name="infer-0", queue="infer", threads=1),
    )
    daemon = make_daemon(workers=workers)
    daemon.start()
    small = {"hidden_size": 16, "layers": 2, "heads": 2, "ffn_size": 32}
    options = {"data": str(sources), "vocab_size": 300, "seq_len": 64, "batch_size": 2}
    train = {**options, "steps": 2, "validation": 0.0, "eval_every": 0}
    first = daemon.client.jobs.submit(spec_class("mlm").parse({**train, **small}))
    assert daemon.wait(first)["status"] == "finished"
    folder = daemon.client.rundir(first).path / "model"
    home = daemon.home.path
    loaded = warmd("load", f"enc={folder}", home=home)
    assert loaded.code == 0, loaded.err
    second = daemon.client.jobs.submit(spec_class("mlm").parse({**train, "model": "enc"}))
    assert daemon.wait(second)["status"] == "finished", daemon.client.jobs.get(second)["error"]
    texts = ("--text", "def f(x):", "--text", "--dry-run")  # the value of an option, and no option
    done = warmd("submit", "encode", "--model", "enc", *texts, "--wait", home=home)
    assert done.code == 0, done.err
    (result,) = warmd("result", done.out.strip(), "--json", home=home).objects
    assert np.array(result["embeddings"]).shape == (2, 16)
    assert result["timings"]["queued_s"] >= 0
    # A checkpoint will do as well as a finished model.
    (checkpoint,) = (daemon.client.rundir(second).path / "checkpoints").glob("*-2")
    again = warmd(
        "submit", "encode", "--model", str(checkpoint), *texts, "--wait", "--json", home=home
    )
    assert again.code == 0, again.err
    (same,) = warmd("result", again.objects[0]["id"], "--json", home=home).objects
    assert not np.array_equal(same["embeddings"], result["embeddings"])  # trained on
