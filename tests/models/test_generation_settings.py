"""Settings of a model's generation_config.json that warmd does not apply are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import grpo_jobs
import orjson
import pytest
import tiny
from shell import warmd
from transformers import GenerationConfig

from warmd.configs.config import ModelConfig
from warmd.daemon.fork.models import WarmModels
from warmd.jobs.context import WarmModel
from warmd.jobs.eval.kind import run as run_eval
from warmd.jobs.eval.options import EvalSpec
from warmd.jobs.grpo.kind import run as run_grpo
from warmd.jobs.infer.kind import run as run_infer
from warmd.jobs.infer.options import InferSpec
from warmd.jobs.models.generation_settings import of_rollouts_words, unapplied

SETTINGS: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "suppress_tokens": [*range(20, 60)],
    "do_sample": True,
    "min_p": 0.05,
    "num_beams": 2,
    "temperature": 0.6,  # an option of warmd, as top_p and top_k
    "top_p": 0.9,
    "top_k": 20,
    "max_new_tokens": 100,
}
NAMED = ("min_p", "num_beams", "repetition_penalty", "suppress_tokens")


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    found = shutil.copytree(tiny_model, tmp_path / "m")
    path = found / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **SETTINGS}))
    return found


def load(folder: Path) -> WarmModel:
    config = ModelConfig(name="m", path=str(folder))
    return WarmModels(10**9).ensure(config, folder, in_use=()).warm


@pytest.fixture
def job(folder: Path, tmp_path: Path) -> tiny.Surroundings:
    warm = load(folder)
    job = tiny.surroundings(tmp_path / "infer-20261121-184200-x7f2")
    job.ctx.models.take = lambda name: warm  # type: ignore[method-assign]
    return job


def warnings_of(job: tiny.Surroundings) -> list[str]:
    return [event["message"] for event in job.events if event["type"] == "warning"]


WORDS = (
    "model: its generation settings min_p=0.05, num_beams=2, repetition_penalty=1.3, "
    "suppress_tokens=[20, 21, 22, 23, 24, 25, 26, 27, 28, 29… are not applied; transformers "
    "applies them"
)


@pytest.mark.slow
def test_infer_and_eval_name_what_they_do_not_apply(job, tmp_path):
    run_infer(InferSpec.parse({"model": "m", "prompt": "1+1=", "max_tokens": 2}), job.ctx)
    assert warnings_of(job) == [WORDS]
    job.events.clear()
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b'{"question": "1+1=", "answer": "2"}')
    options = {"model": "m", "dataset": str(rows), "reward": ["correctness"], "max_tokens": 2}
    run_eval(EvalSpec.parse(options), job.ctx)
    assert warnings_of(job) == [WORDS]


def test_grpo_names_what_its_rollouts_apply_and_what_not(like_a_work_horse, job):
    run_grpo(grpo_jobs.spec(), job.ctx)
    assert warnings_of(job) == [
        "model: its generation settings num_beams=2 are not applied; transformers applies them",
        "model: its generation settings min_p=0.05, repetition_penalty=1.3, "
        "suppress_tokens=[20, 21, 22, 23, 24, 25, 26, 27, 28, 29… are applied to rollouts, as in "
        "TRL, but not by infer and eval",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words_ids", [[20], [21, 22]]),
        pytest.param("exponential_decay_length_penalty", (1, 1.1), marks=pytest.mark.slow),
        pytest.param("encoder_repetition_penalty", 1.2, marks=pytest.mark.slow),
        pytest.param("guidance_scale", 1.5, marks=pytest.mark.slow),
        pytest.param("min_new_tokens", 3, marks=pytest.mark.slow),
        pytest.param("forced_eos_token_id", 2, marks=pytest.mark.slow),
        ("no_repeat_ngram_size", 2),
    ],
)
def test_no_setting_fails_a_rollout(like_a_work_horse, tmp_path, name, value):
    warm = tiny.model()
    setattr(warm.generation_config, name, value)
    job = tiny.surroundings(tmp_path, warm)
    run_grpo(grpo_jobs.spec(samples=4), job.ctx)
    assert job.of_type("step")


@pytest.mark.slow
def test_load_names_them_and_its_json_has_their_values(shared_daemon, folder):
    home = shared_daemon.config.home
    done = warmd("load", "--once", f"set={folder}", home=home)
    assert f"set: {WORDS.removeprefix('model: ')}" in " ".join(done.err.split())
    done = warmd("load", "--once", f"set={folder}", "--json", home=home)
    assert orjson.loads(done.out)["unapplied"] == {name: SETTINGS[name] for name in NAMED}
    assert warmd("models", "--unload", "set", home=home).code == 0


def test_neutral_values_and_options_of_warmd_need_no_word(tiny_model):
    assert load(tiny_model).unapplied == {}
    neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": []}
    neutral |= {"num_beams": 1, "typical_p": 1.0, "min_length": 0, "remove_invalid_values": False}
    assert unapplied(GenerationConfig(**neutral, do_sample=True, temperature=0.5)) == {}
    assert unapplied(GenerationConfig(min_p=0.1, top_k=5)) == {}  # without do_sample: greedy
    assert unapplied(None) == {}
    assert of_rollouts_words({}) == []


def test_values_that_json_cannot_hold_are_texts():
    found = unapplied(GenerationConfig(sequence_bias={(5, 6): -2.0}, stop_strings="end"))
    assert found == {"sequence_bias": "{(5, 6): -2.0}", "stop_strings": "end"}
