"""Weights that do not fit their model are refused by name, wherever they are loaded."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import mlm_jobs
import pytest
import tiny
import tiny_vision
import torch
from adapters import lora, write_adapter
from architectures import DECODED, OTHERS, bert, make
from safetensors.torch import load_file, save_file
from shell import warmd
from transformers import AutoModelForMaskedLM, LlamaConfig, LlamaForCausalLM
from waiting import wait_until

from warmd.configs.config import DaemonConfig, ModelConfig
from warmd.daemon.client.checking import document_of
from warmd.daemon.fork.merging import write_merged
from warmd.daemon.fork.models import WarmModels
from warmd.daemon.host.warm_set import known_models
from warmd.jobs import spec_class
from warmd.jobs.context import WarmModel
from warmd.jobs.errors import JobFailed, SpecError, Stopped
from warmd.jobs.mlm.kind import run as run_mlm
from warmd.jobs.mlm.options import MlmSpec
from warmd.jobs.models.pretrained import CLASSES
from warmd.jobs.models.weight_headers import count_parameters
from warmd.jobs.sft.kind import run as run_sft
from warmd.jobs.sft.options import SftSpec

ROOT = Path(__file__).parents[2]
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"


def load(folder: Path, task: str = "auto") -> WarmModel:
    config = ModelConfig(name="m", path=str(folder), task=task)
    return WarmModels(10**9).ensure(config, folder, in_use=()).warm


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, which has 20 tensors and a tied head."""
    return shutil.copytree(tiny_model, tmp_path / "m")


Tensors = dict[str, torch.Tensor]


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    weights = {name: tensor.clone() for name, tensor in load_file(folder / FILE).items()}
    save_file(change(weights), folder / FILE, metadata={"format": "pt"})


def configure(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def without(*gone: str) -> Callable[[Tensors], Tensors]:
    return lambda weights: {name: weights[name] for name in weights if name not in gone}


def prefixed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda weights: {prefix + name: weights[name] for name in weights}


def refusal(folder: Path, task: str = "auto") -> str:
    with pytest.raises(JobFailed) as refused:
        load(folder, task)
    message = str(refused.value)
    assert message.startswith(f"model: m cannot be loaded from {folder}: ")
    assert "\n" not in message
    return message


def test_a_file_that_lacks_a_tensor_is_refused_by_its_name(folder):
    rewrite(folder, without(UP))
    assert f"1 of 21 tensors is missing: {UP}: config.json must describe" in refusal(folder)


def test_a_tensor_that_the_model_has_no_place_for_is_refused_by_its_name(folder):
    rewrite(folder, lambda weights: weights | {"v_head.weight": torch.ones(2)})
    assert "LlamaForCausalLM: 1 unexpected: v_head.weight: " in refusal(folder)


@pytest.mark.parametrize(
    ("prefix", "advice"),
    [
        ("_orig_mod.", "of torch.compile: save the model that was compiled"),
        ("module.", "of DistributedDataParallel: save the wrapped model"),
        ("base_model.model.", "of PEFT: save the result of merge_and_unload"),
        ("student.", "the names have the prefix student.: save the model without it"),
        ("model._orig_mod.", "of torch.compile"),
    ],
)
def test_names_with_a_prefix_are_refused_with_what_to_do(folder, prefix, advice):
    rewrite(folder, prefixed(prefix))
    message = refusal(folder)
    assert f"{prefix}model.embed_tokens.weight" in message
    assert "and 17 more" in message
    assert advice in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_hidden_layers": 3}, "9 of 30 tensors are missing: model.layers.2."),
        ({"num_hidden_layers": 1}, "9 unexpected: model.layers.1."),
        ({"tie_word_embeddings": False}, "missing: lm_head.weight: set tie_word_embeddings"),
        ({"vocab_size": 80}, "1 of another shape: model.embed_tokens.weight (81, 16) instead"),
        ({"attention_bias": True}, "8 of 29 tensors are missing: model.layers.0.self_attn."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_of_another_model_than_the_files_hold_is_refused(folder, settings, words):
    configure(folder, **settings)
    assert words in refusal(folder)


def test_an_index_that_names_a_tensor_which_its_shard_lacks_is_refused(folder):
    shard = "model-00001-of-00001.safetensors"
    names = list(load_file(folder / FILE))
    (folder / FILE).rename(folder / shard)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}
    (folder / INDEX).write_text(json.dumps(index))
    assert load(folder).new_head == ()
    index["weight_map"]["model.layers.7.mlp.up_proj.weight"] = shard
    (folder / INDEX).write_text(json.dumps(index))
    words = f"{INDEX} names 1 of 21 tensors that no file has: model.layers.7.mlp.up_proj.weight"
    assert words in refusal(folder)


def test_weights_that_are_integers_are_refused_by_name_also_at_submit(folder, tmp_path):
    rewrite(folder, lambda weights: weights | {UP: (weights[UP] * 100).to(torch.int8)})
    message = rf"1 of 20 tensors are integers: {UP} \(I8\): its weights are quantized: must be "
    with pytest.raises(JobFailed, match=message):
        load(folder)
    spec = spec_class("infer").parse({"model": "m", "prompt": "a"})
    config = DaemonConfig(home=tmp_path / "home")
    model = ModelConfig(name="m", path=str(folder))
    with pytest.raises(SpecError, match=rf"^model: .*{message}"):
        document_of(spec, config, init=None, model=model)


def test_copies_of_the_weights_in_another_layout_are_not_counted(folder):
    parameters = count_parameters(folder)
    shutil.copyfile(folder / FILE, folder / "consolidated.safetensors")
    assert count_parameters(folder) == parameters
    (folder / FILE).rename(folder / "a.safetensors")
    names = dict.fromkeys(load_file(folder / "a.safetensors"), "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert count_parameters(folder) == parameters
    load(folder)


@pytest.mark.parametrize("part", ["w1", "w2"])
def test_a_mixture_that_lacks_a_matrix_of_an_expert_is_refused_by_name(tmp_path, part):
    folder = saved(make("Mixtral"), tmp_path / "m")
    rewrite(folder, without(f"model.layers.0.block_sparse_moe.experts.1.{part}.weight"))
    assert "model.layers.0.mlp.experts." in refusal(folder)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("Llama", ["model.layers.0.self_attn.rotary_emb.inv_freq"]),
        ("GPT2", ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]),
        ("GPTNeo", ["transformer.h.1.attn.attention.bias"]),
        ("GPTNeo", ["transformer.h.1.attn.attention.masked_bias"]),
        ("GPTNeoX", ["gpt_neox.layers.0.attention.masked_bias"]),
    ],
)
def test_derived_values_of_old_files_are_no_weights(tmp_path, kind, names):
    folder = saved(make(kind), tmp_path / "m")
    rewrite(folder, lambda weights: weights | {name: torch.ones(4) for name in names})
    assert load(folder).left_out == ()


IMAGES = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")
MASKED = ("bert", "roberta", "distilbert", "modernbert", "deberta")


DAILY = ("Qwen2", "Qwen3", "GPT2", "Mixtral", "Mamba", "Qwen3VL", "bert", "modernbert", "deberta")
WIDE = pytest.mark.nightly(
    part="oracles", catches="an architecture that is loaded without some of its weights"
)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in DAILY else WIDE)
        for kind in (*DECODED, *OTHERS, *IMAGES, *MASKED)
    ],
)
def test_a_saved_model_of_each_architecture_is_loaded_whole(tmp_path, kind):
    if kind in MASKED:
        model = AutoModelForMaskedLM.from_config(mlm_jobs.CONFIGS[kind])
    else:
        model = tiny_vision.make(kind) if kind in IMAGES else make(kind)
    found = load(saved(model, tmp_path / "m"))
    assert found.left_out == found.new_head == ()
    wanted, weights = model.state_dict(), found.model.state_dict()
    assert wanted.keys() == weights.keys()
    assert all(torch.equal(wanted[name], weights[name]) for name in wanted)


# --- Heads ----------------------------------------------------------------------------------------


def test_a_head_is_left_out_of_an_embedding_model_and_named(tmp_path):
    found = load(saved(bert("BertForPreTraining"), tmp_path / "m"), "embedding")
    assert type(found.model).__name__ == "BertModel"
    assert "cls.predictions.bias" in found.left_out
    assert all(name.startswith("cls.") for name in found.left_out)


def test_a_pooler_that_the_files_lack_is_not_made(tmp_path):
    folder = saved(bert("BertForMaskedLM"), tmp_path / "m")
    found = load(folder, "embedding").model
    assert found.pooler is None
    assert found(torch.tensor([[5, 6]])).last_hidden_state.shape == (1, 2, 16)


def test_what_only_pretraining_needs_is_left_out_of_a_model_that_fills_masks(tmp_path):
    folder = saved(bert("BertForPreTraining"), tmp_path / "m")
    configure(folder, architectures=["BertForMaskedLM"])  # as the first BERT of the hub
    assert load(folder).left_out == (
        "bert.pooler.dense.bias",
        "bert.pooler.dense.weight",
        "cls.seq_relationship.bias",
        "cls.seq_relationship.weight",
    )


def test_a_new_head_is_the_same_in_every_process_and_draws_from_no_generator(tmp_path):
    folder = saved(bert("BertModel"), tmp_path / "m")
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    one = load(folder, "masked-lm")
    assert torch.equal(torch.rand(1), wanted)
    two = load(folder, "masked-lm")
    assert one.new_head == two.new_head
    assert "cls.predictions.transform.dense.weight" in one.new_head
    others = two.model.state_dict()
    assert all(torch.equal(t, others[name]) for name, t in one.model.state_dict().items())


def test_a_head_that_is_there_in_part_is_refused(tmp_path):
    folder = saved(bert("BertForMaskedLM"), tmp_path / "m")
    rewrite(folder, without("cls.predictions.transform.dense.bias"))
    assert "missing: cls.predictions.transform.dense.bias" in refusal(folder, "masked-lm")


def test_layers_that_a_config_leaves_out_are_no_head(folder):
    configure(folder, num_hidden_layers=1)
    assert "9 unexpected: model.layers.1." in refusal(folder, "embedding")


# --- Everywhere -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("like_a_work_horse")
@pytest.mark.parametrize("lora", [None, 2])
def test_a_masked_training_says_that_its_head_is_new(tmp_path, lora):
    folder = saved(bert("BertModel"), tmp_path / "m")
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"mask_token": "?"})
    job = tiny.surroundings(tmp_path / "job")
    warm = replace(load(folder, "masked-lm"), tokenizer=tokenizer)
    job.ctx.models.take = lambda name: warm  # type: ignore[method-assign]
    (tmp_path / "data.txt").write_text("\n\n".join(f"abc def {n}" for n in range(60)))
    options = {"model": "m", "objective": "mlm", "data": str(tmp_path / "data.txt"), "steps": 1}
    spec = MlmSpec.parse(
        {**options, "seq_len": 16, "eval_every": 0, "batch_size": 2}
        | ({} if lora is None else {"lora": lora})
    )
    if lora is not None:
        with pytest.raises(JobFailed, match=r"^lora: must be unset for a model without a head"):
            run_mlm(spec, job.ctx)
        return
    run_mlm(spec, job.ctx)
    (warning,) = job.of_type("warning")
    assert "m has no head for masked tokens, so a new one is trained" in warning["message"]
    assert "6 tensors: cls.predictions.bias" in warning["message"]


@pytest.mark.usefixtures("like_a_work_horse")
def test_a_job_is_not_resumed_on_a_model_with_other_tensors_than_its_checkpoint(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1+1=", "completion": "2"}\n' * 4)
    spec = SftSpec.parse({"model": "demo", "dataset": str(data), "steps": 3, "save_every": 1})
    job = tiny.surroundings(tmp_path / "job")
    job.stop_at_step = 2
    with pytest.raises(Stopped):
        run_sft(spec, job.ctx)
    larger = {**tiny.model().config.to_dict(), "num_hidden_layers": 3}
    job = tiny.surroundings(tmp_path / "job", LlamaForCausalLM(LlamaConfig(**larger)))
    with pytest.raises(JobFailed, match=r"9 of 30 tensors are missing in it \(model.layers.2."):
        run_sft(spec, job.ctx)


@pytest.mark.parametrize("merges", [False, True], ids=["served unmerged", "merged"])
def test_the_base_of_an_adapter_is_refused_like_any_model(folder, tmp_path, merges):
    adapter = tmp_path / "adapter"
    write_adapter(adapter, folder, lora(use_dora=merges))
    rewrite(folder, without(UP))
    with pytest.raises(JobFailed, match=f"^model: .* 1 of 21 tensors is missing: {UP}"):
        WarmModels(10**9).ensure(ModelConfig(name="a", path=str(adapter)), adapter, in_use=())
    with pytest.raises(JobFailed, match=f"^model: a cannot be .* 1 of 21 .* missing: {UP}"):
        write_merged("a", adapter, tmp_path / "whole")


def test_names_of_a_wrapper_are_refused_when_the_job_is_submitted(folder, tmp_path):
    rewrite(folder, prefixed("_orig_mod."))
    model = ModelConfig(name="m", path=str(folder))
    spec = spec_class("infer").parse({"model": "m", "prompt": "a"})
    with pytest.raises(SpecError, match=r"^model: .*all tensors are missing, as its 20 "):
        document_of(spec, DaemonConfig(home=tmp_path / "home"), init=None, model=model)


@pytest.mark.slow
def test_load_http_and_jobs_on_a_folder_say_which_tensor_is_missing(shared_daemon, folder):
    words = f"1 of 21 tensors is missing: {UP}"
    home, client = shared_daemon.config.home, shared_daemon.client
    assert warmd("load", f"later-broken={folder}", home=home).code == 0
    rewrite(folder, without(UP))
    loaded = warmd("load", "later-broken", home=home)
    assert loaded.is_refusal(1)
    assert words in loaded.err
    answer = httpx.post(
        f"{shared_daemon.status()['http']['url']}/v1/warmd/models/load",
        json={"name": "later-broken"}, headers={"X-Warmd": "1"}, timeout=30,
    )  # fmt: skip
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (
        *(400, "invalid_request_error"),
        "name",
    )
    assert words in error["message"]
    assert error["message"].startswith("model: later-broken cannot be loaded from ")
    assert "\n" not in error["message"]
    job = client.jobs.submit(spec_class("infer").parse({"model": str(folder), "prompt": "a"}))
    wait_until(lambda: client.jobs.get(job)["status"] == "failed")
    assert words in client.jobs.get(job)["error"]
    warmd("models", "--unload", "later-broken", home=home)
    assert "later-broken" not in known_models(shared_daemon.home)


def test_weights_are_loaded_in_one_place_only():
    classes = "|".join(sorted(CLASSES.values(), key=len, reverse=True))
    calls = re.compile(
        rf"(?:{classes}|\bauto|PreTrainedModel|_class)\.from_pretrained|"
        r"(?<!optimizer\.)(?<!schedule\.)load_state_dict\(|"
        r"\bload_(?:sharded_)?checkpoint\("
    )
    found = [
        path.relative_to(ROOT)
        for folder in ("jobs", "daemon", "cli", "configs")
        for path in (ROOT / folder).rglob("*.py")
        if calls.search(path.read_text())
    ]
    assert found == [Path("jobs/models/pretrained.py")]
