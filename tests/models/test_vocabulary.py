"""Tokens of a tokenizer that its model has no embedding for are refused by name, everywhere."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import tiny
from architectures import bert, make
from breadth import mostly_slow
from shell import warmd

from warmd.configs.config import ModelConfig
from warmd.daemon.fork.models import WarmModels
from warmd.jobs.context import WarmModel
from warmd.jobs.dpo.kind import run as run_dpo
from warmd.jobs.dpo.options import DpoSpec
from warmd.jobs.encode.kind import run as run_encode
from warmd.jobs.encode.options import EncodeSpec
from warmd.jobs.errors import JobFailed
from warmd.jobs.eval.kind import run as run_eval
from warmd.jobs.eval.options import EvalSpec
from warmd.jobs.grpo.kind import run as run_grpo
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.infer.kind import run as run_infer
from warmd.jobs.infer.options import InferSpec
from warmd.jobs.sft.kind import run as run_sft
from warmd.jobs.sft.options import SftSpec

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

ADDED = "<think>"
PROBLEM = r"token 81 \('<think>'\) is not among the 81 of "
ROW = {"prompt": "1+1=", "completion": "2", "chosen": "2", "rejected": "3", "answer": "2"}
PLAIN = [{**ROW, "prompt": f"1+{n}="} for n in range(4)]
ROWS = [PLAIN[0], {**ROW, "prompt": f"1{ADDED}1="}, *PLAIN[2:]]


def larger_tokenizer() -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([ADDED], special_tokens=True)
    return tokenizer


def surroundings(folder: Path) -> tiny.Surroundings:
    job = tiny.surroundings(folder)
    job.ctx.models.tokenizer = larger_tokenizer()  # type: ignore[attr-defined]
    return job


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    return str(path)


ONE_STEP = {"model": "demo", "steps": 1, "save_every": 1}
GRPO = {"model": "demo", "samples": 4, "num_generations": 2, "max_completion_length": 2,
        "reward": ["tiny:digit_share"]}  # fmt: skip
JOBS: dict[str, tuple[Callable[[str, tiny.Surroundings], Any], str]] = {
    "sft": (
        lambda data, job: run_sft(SftSpec.parse({**ONE_STEP, "dataset": data}), job.ctx),
        r"dataset: .*rows.jsonl, line 2: ",
    ),
    "dpo": (
        lambda data, job: run_dpo(DpoSpec.parse({**ONE_STEP, "dataset": data}), job.ctx),
        r"dataset: .*rows.jsonl, line 2: ",
    ),
    "grpo": (
        lambda data, job: run_grpo(GrpoSpec.parse({**GRPO, "dataset": data}), job.ctx),
        r"dataset: the prompt of row 2: ",
    ),
    "eval": (
        lambda data, job: run_eval(
            EvalSpec.parse({"model": "demo", "dataset": data, "reward": ["correctness"]}),
            job.ctx,
        ),
        r"dataset: the prompt of row 2: ",
    ),
    "perplexity": (
        lambda data, job: run_eval(
            EvalSpec.parse(
                {"model": "demo", "dataset": data, "task": "perplexity", "columns": ["text=prompt"]}
            ),
            job.ctx,
        ),
        r"dataset: row 2: ",
    ),
    "encode": (
        lambda data, job: run_encode(
            EncodeSpec.parse({"model": "demo", "text": f"a{ADDED}"}), job.ctx
        ),
        r"input: 0: ",
    ),
    "infer": (
        lambda data, job: run_infer(
            InferSpec.parse({"model": "demo", "prompt": f"a{ADDED}"}), job.ctx
        ),
        r"prompt: ",
    ),
}


@pytest.mark.parametrize("kind", JOBS)
def test_a_text_with_a_token_that_the_model_lacks_is_refused_by_row_and_token(tmp_path, kind):
    job = surroundings(tmp_path / "job")
    run, place = JOBS[kind]
    with pytest.raises(JobFailed, match=f"^{place}{PROBLEM}") as refused:
        run(write(tmp_path, ROWS), job)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", mostly_slow(["sft", "dpo", "grpo", "eval"], but=["grpo"]))
def test_texts_without_such_tokens_are_used(tmp_path, kind):
    job = surroundings(tmp_path / "job")
    assert JOBS[kind][0](write(tmp_path, PLAIN), job) is not None


def test_tokens_that_a_larger_model_made_are_not_used_for_a_smaller_one(tmp_path):
    data = write(tmp_path, ROWS)
    larger = tiny.model()
    larger.resize_token_embeddings(82)
    job = tiny.surroundings(tmp_path / "job", larger)
    job.ctx.models.tokenizer = larger_tokenizer()  # type: ignore[attr-defined]
    run, _ = JOBS["sft"]
    run(data, job)
    with pytest.raises(JobFailed, match=PROBLEM):
        run(data, surroundings(tmp_path / "other"))


@pytest.mark.parametrize("kind", mostly_slow(["sft", "dpo", "grpo"], but=["sft"]))
def test_a_padding_token_that_the_model_lacks_is_refused_where_it_is_used(tmp_path, kind):
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    data = write(tmp_path, [{**row, "chosen": "2" * n} for n, row in enumerate(PLAIN, 1)])
    packed = tiny.surroundings(tmp_path / "packed")
    packed.ctx.models.tokenizer = tokenizer  # type: ignore[attr-defined]
    run, _ = JOBS[kind]
    run(data, packed)
    padded = tiny.surroundings(tmp_path / "padded", make("GPT2"))
    padded.ctx.models.tokenizer = tokenizer  # type: ignore[attr-defined]
    with pytest.raises(
        JobFailed, match=r"^model: its padding token: token 81 \('\[PAD\]'\) is not"
    ):
        run(data, padded)


def test_padding_that_the_model_lacks_changes_no_embedding(tmp_path):
    texts = [{"text": "a" * n} for n in range(1, 9)]
    found = []
    for name in ("usual", "lacking"):
        job = tiny.surroundings(tmp_path / name)
        tokenizer = job.ctx.models.tokenizer  # type: ignore[attr-defined]
        if name == "lacking":
            tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        path = tmp_path / f"{name}.npz"
        spec = {"model": "demo", "input": write(tmp_path, texts), "output": str(path)}
        run_encode(EncodeSpec.parse(spec), job.ctx)
        found.append(np.load(path)["embeddings"])
    assert np.array_equal(*found)


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A model folder whose tokenizer has one token more than the model."""
    folder = shutil.copytree(tiny_model, tmp_path / "m")
    larger_tokenizer().save_pretrained(folder)
    return folder


def test_a_model_is_loaded_with_the_tokens_that_it_lacks_named(folder):
    config = ModelConfig(name="m", path=str(folder))
    loaded = WarmModels(10**9).ensure(config, folder, in_use=())
    assert isinstance(loaded.warm, WarmModel)
    assert loaded.to_json()["unembedded"] == [ADDED]


@pytest.mark.slow
def test_load_says_what_is_left_out_and_which_tokens_fail(shared_daemon, folder, tmp_path):
    home = shared_daemon.config.home
    done = warmd("load", "--once", f"larger={folder}", home=home)
    assert done.code == 0
    assert "larger: 1 tokens of its tokenizer have no embedding: texts with them fail" in done.err
    bert("BertForPreTraining").save_pretrained(tmp_path / "bert")
    tiny.tokenizer().save_pretrained(tmp_path / "bert")
    done = warmd("load", "--once", f"vectors={tmp_path / 'bert'},task=embedding", home=home)
    assert "vectors: 7 tensors of its files are not used: cls.predictions.bias, " in done.err
    for name in ("larger", "vectors"):
        assert warmd("models", "--unload", name, home=home).code == 0


def test_data_show_counts_rows_with_such_tokens_as_bad_and_names_the_first(folder, tmp_path):
    write(tmp_path, ROWS)
    done = warmd(
        *("data", "show", "rows.jsonl", "--model", str(folder), "--json"),
        home=tmp_path / "home", folder=tmp_path,
    )  # fmt: skip
    (found,) = done.objects
    assert (found["kinds"]["sft"]["usable"], found["kinds"]["sft"]["bad"]) == (3, 1)
    fault = found["kinds"]["sft"]["first_fault"]
    assert re.match(f"dataset: .*rows.jsonl, line 2: {PROBLEM}", fault)
