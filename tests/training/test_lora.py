"""LoRA in every training kind: options, exact resume, small checkpoints, PEFT's format."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dpo_jobs
import peft
import pytest
import sft_jobs
import tiny
import torch
from breadth import mostly_slow
from mlm_jobs import CONFIGS, make_home, text_spec
from needs import needs
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from warmd.jobs import spec_class
from warmd.jobs.compute.levels import levels
from warmd.jobs.context import step_of
from warmd.jobs.dpo.kind import run as run_dpo
from warmd.jobs.errors import JobFailed, SpecError, Stopped
from warmd.jobs.grpo.kind import run as run_grpo
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.mlm.kind import run as run_mlm
from warmd.jobs.sft.kind import run as run_sft

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

ADAPTER = "adapter_model.safetensors"
KINDS = ("grpo", "sft", "dpo", "mlm")


@dataclasses.dataclass
class Work:
    """A kind, with options for six steps, its model and the files of that model."""

    kind: str
    run: Callable[..., dict[str, Any]]
    options: dict[str, Any]
    model: Any
    folder: Path

    def job(self, folder: Path) -> tiny.Surroundings:
        """The surroundings of a job on a fresh copy of the model."""
        job = tiny.surroundings(folder, self.read())
        job.ctx.models.tokenizer = self.tokenizer  # type: ignore[attr-defined]
        take = job.ctx.models.take
        job.ctx = dataclasses.replace(job.ctx, models=_At(take, self.folder))
        return job

    def read(self) -> Any:
        auto: Any = AutoModelForMaskedLM if self.kind == "mlm" else AutoModelForCausalLM
        return auto.from_pretrained(self.folder)

    @property
    def tokenizer(self) -> Any:
        made = tiny.tokenizer()
        if self.kind == "mlm":
            made.add_special_tokens({"mask_token": "$"})
        return made

    def spec(self, **options: Any) -> Any:
        return spec_class(self.kind).parse(self.options | {"lora": 2} | options)


@dataclasses.dataclass
class _At:
    """Warm models that were read from `folder`."""

    _take: Callable[[str], Any]
    folder: Path

    def take(self, name: str) -> Any:
        return dataclasses.replace(self._take(name), path=self.folder)


@pytest.fixture(params=KINDS)
def work(request: Any, tmp_path: Path) -> Work:
    """A job of each training kind."""
    folder = tmp_path / "base"
    every = {"model": "demo", "steps": 6, "save_every": 2, "keep": 100}
    if request.param == "mlm":
        home = tmp_path / "data"
        home.mkdir()
        make_home(home)
        config = CONFIGS["bert"]
        model = AutoModelForMaskedLM.from_config(config)
        model.save_pretrained(folder)
        options = text_spec(home).to_json() | every
        options |= {"architecture": "code-graph", "eval_every": 0, "vocab_size": 8000}
        return Work("mlm", run_mlm, options | {"learning_rate": 2e-2}, model, folder)
    model = tiny.model()
    model.save_pretrained(folder)
    if request.param == "sft":
        rows = sft_jobs.write(tmp_path / "rows.jsonl", sft_jobs.ROWS["text"])
        return Work("sft", run_sft, every | {"dataset": rows, "batch_size": 2}, model, folder)
    if request.param == "dpo":
        rows = sft_jobs.write(tmp_path / "rows.jsonl", dpo_jobs.ROWS["texts"])
        return Work("dpo", run_dpo, every | {"dataset": rows, "batch_size": 2}, model, folder)
    options = every | {
        "samples": 6,
        "num_generations": 4,
        "max_completion_length": 6,
        "reward": ["tiny:digit_share"],
        "beta": 0.1,
    }
    return Work("grpo", run_grpo, options, model, folder)


OTHER_KINDS = pytest.mark.nightly(
    part="oracles", catches="a kind of training that loses a part of its adapter at a stop"
)
EACH = ["grpo", *(pytest.param(kind, marks=OTHER_KINDS) for kind in ("sft", "dpo", "mlm"))]


@pytest.mark.slow
@pytest.mark.parametrize("work", EACH, indirect=True)
def test_a_stopped_job_ends_with_the_adapter_of_an_uninterrupted_run(work, tmp_path):
    straight = work.job(tmp_path / "straight")
    work.run(work.spec(), straight.ctx)
    assert straight.last_step == 6
    for stop in (1, 3, 4):
        stopped = work.job(tmp_path / "stopped")
        stopped.stop_at_step = stop
        with pytest.raises(Stopped):
            work.run(work.spec(), stopped.ctx)
    work.run(work.spec(), work.job(tmp_path / "stopped").ctx)
    adapters = [(tmp_path / name / "model" / ADAPTER) for name in ("straight", "stopped")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    assert not [e for e in straight.of_type("warning") if "lora" in e["message"]]


@pytest.mark.slow
@pytest.mark.parametrize("work", EACH, indirect=True)
def test_a_stopped_job_on_an_int8_base_ends_with_the_adapter_of_an_uninterrupted_run(
    work, tmp_path
):
    needs(levels().int8 is not None, "int8 kernels")
    spec = work.spec(base_precision="int8")
    work.run(spec, work.job(tmp_path / "straight").ctx)
    stopped = work.job(tmp_path / "stopped")
    stopped.stop_at_step = 3
    with pytest.raises(Stopped):
        work.run(spec, stopped.ctx)
    job = work.job(tmp_path / "stopped")
    work.run(spec, job.ctx)
    adapters = [(tmp_path / name / "model" / ADAPTER) for name in ("straight", "stopped")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    with safe_open(adapters[0], "pt") as file:
        assert file.metadata()["warmd_base_precision"] == "int8"
    native = work.job(tmp_path / "native")
    work.run(work.spec(), native.ctx)
    losses = [[event["loss"] for event in run.of_type("step")] for run in (job, native)]
    assert losses[0] != losses[1][-len(losses[0]) :]


@pytest.mark.parametrize("work", mostly_slow(KINDS, but=("dpo",)), indirect=True)
def test_its_checkpoints_hold_the_adapter_and_no_weights_of_the_model(work, tmp_path):
    job = work.job(tmp_path / "run")
    work.run(work.spec(), job.ctx)
    latest = job.ctx.checkpoints.latest()
    assert latest is not None
    assert step_of(latest) == 6
    trained = job.of_type("begin")[0]["trained_parameters"]
    assert 0 < trained < job.of_type("begin")[0]["parameters"]
    assert (latest / ADAPTER).stat().st_size < 4 * trained + 8000  # float32, and the header
    assert not (latest / "model.safetensors").exists()


@pytest.mark.parametrize("work", mostly_slow(KINDS, but=("grpo",)), indirect=True)
def test_peft_reads_the_adapter_and_computes_what_was_trained(work, tmp_path):
    job = work.job(tmp_path / "run")
    trained = job.ctx.models.take("demo").model  # which gets its adapter in place
    ids = torch.tensor([[5, 6, 7, 8]])
    before = trained(ids).logits
    work.run(work.spec(), job.ctx)
    settings = json.loads((tmp_path / "run/model/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(work.folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an attribute that transformers deprecates
        read: Any = peft.PeftModel.from_pretrained(work.read(), tmp_path / "run/model")
    logits = read(ids).logits
    assert torch.equal(logits, trained.eval()(ids).logits)
    assert not torch.allclose(logits, before, atol=1e-3)


@pytest.mark.parametrize("work", mostly_slow(KINDS, but=("mlm",)), indirect=True)
def test_the_model_below_the_adapter_is_not_changed(work, tmp_path):
    job = work.job(tmp_path / "run")
    warm = job.ctx.models.take("demo").model
    before = {name: weight.clone() for name, weight in warm.named_parameters()}
    work.run(work.spec(), job.ctx)
    after = {
        n.replace(".base_layer", ""): w for n, w in warm.named_parameters() if "lora_" not in n
    }
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_alpha": 16, "lora": None}, "lora_alpha: must go with lora, got 16 with lora none"),
        (
            {"lora_targets": ["q_proj"], "lora": None},
            "lora_targets: must go with lora, got q_proj with lora none",
        ),
        (
            {"base_precision": "int8", "lora": None},
            "base_precision: must go with lora, got int8 with lora none",
        ),
        (
            {"base_precision": "int8", "rollout_dtype": "int8"},
            "rollout_dtype: must not be int8 with base_precision int8, got int8 with "
            "base_precision int8",
        ),
        ({"lora": 0}, "lora: must be an integer of at least 1 and at most 4096, got 0"),
        (
            {"lora_targets": ["q_proj", "all-linear"]},
            "lora_targets: must be all-linear or names of layers, got q_proj, all-linear",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(SpecError) as refused:
        spec_class("grpo").parse({"lora": 8} | options)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lora_targets": ["q_proj", "fc_7"]},
            "lora_targets: must be all-linear or layers of it (down_proj, embed_tokens, gate_proj, "
            "k_proj, o_proj, q_proj, up_proj, v_proj), got 'fc_7'",
        ),
        ({"lora": 17}, "lora: must be at most 16, the largest rank of a layer, got 17"),
        (
            {"lora": 9, "lora_targets": ["k_proj"]},
            "lora: must be at most 8, the largest rank of a layer, got 9",
        ),
    ],
)
def test_a_rank_or_layer_that_the_model_does_not_have_is_refused_at_submit(
    tiny_model, options, message
):
    with pytest.raises(SpecError) as refused:
        spec_class("sft").parse({"dataset": "x", "lora": 8} | options).check_layers(tiny_model)
    assert str(refused.value) == message


def test_an_adapter_cannot_be_trained_on_an_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(SpecError, match=r"^lora: must be trained on a model, got an adapter: "):
        spec_class("grpo").parse({"lora": 8}).check_layers(tmp_path)


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_embeddings_and_head_get_no_adapter(tmp_path, name):
    job = tiny.surroundings(tmp_path)
    options = {"lora": 2, "lora_targets": [name], "reward": ["tiny:digit_share"]}
    with pytest.raises(JobFailed, match=r"^lora_targets: must not be the embeddings or the vocab"):
        run_grpo(GrpoSpec.parse(options), job.ctx)


def test_an_int8_base_needs_linear_layers(tmp_path):
    job = tiny.surroundings(tmp_path, GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2)))
    options = {"lora": 2, "base_precision": "int8", "reward": ["tiny:digit_share"]}
    with pytest.raises(JobFailed, match=r"^base_precision: must be native for a gpt2"):
        run_grpo(GrpoSpec.parse(options), job.ctx)


def test_a_layer_that_the_model_does_not_have_fails_the_job(work, tmp_path):
    job = work.job(tmp_path / "run")
    with pytest.raises(JobFailed, match=r"^lora_targets: must be layers of the model: "):
        work.run(work.spec(lora_targets=["nowhere"]), job.ctx)


@pytest.mark.parametrize("work", mostly_slow(KINDS, but=("sft",)), indirect=True)
def test_the_learning_rate_is_ten_times_that_of_full_training_and_a_distant_one_warns(
    work, tmp_path
):
    rates = {}
    for name, lora in (("full", None), ("lora", 2)):
        job = work.job(tmp_path / name)
        spec = work.spec(lora=lora, learning_rate=None, steps=1)
        work.run(spec, job.ctx)
        rates[name] = job.of_type("begin")[0]["learning_rate"]
    most = 1e-3 if work.kind == "grpo" else math.inf
    assert rates["lora"] == pytest.approx(min(10 * rates["full"], most))
    far = work.job(tmp_path / "far")
    work.run(work.spec(learning_rate=rates["full"] / 10, steps=1), far.ctx)
    assert [e["message"].split(":")[0] for e in far.of_type("warning")] == ["learning_rate"]
