"""LoRA adapters, as PEFT writes them: served, and compared with their base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from daemons import Daemon
from safetensors.torch import save_file
from shell import warmd

from warmd.configs.config import ModelConfig
from warmd.daemon.models import WarmModels
from warmd.jobs.errors import JobFailed

RANK, ALPHA = 2, 6
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


def write_adapter(folder: Path, base: Path, **settings: Any) -> Path:
    """An adapter that changes two layers of the tiny model far."""
    folder.mkdir()
    known = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.1, "bias": "none",
        "target_modules": ["q_proj", "down_proj"], "base_model_name_or_path": str(base),
        "use_dora": False, "use_rslora": False, "modules_to_save": None, "rank_pattern": {},
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(known | settings))
    tensors = {}
    generator = torch.Generator().manual_seed(1)
    for name in LAYERS:
        outputs, inputs = tiny.model().get_submodule(name).weight.shape
        for factor, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            value = torch.randn(shape, generator=generator)
            tensors[f"base_model.model.{name}.lora_{factor}.weight"] = value
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def load(folder: Path) -> Any:
    return WarmModels(10**9).ensure(ModelConfig(name="a", path=str(folder)), folder, in_use=())


def merged(folder: Path, scaling: float) -> Any:
    """The tiny model with the adapter's products added, by hand."""
    from safetensors.torch import load_file

    model, tensors = tiny.model(), load_file(folder / "adapter_model.safetensors")
    for name in LAYERS:
        a, b = (tensors[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
        model.get_submodule(name).weight += scaling * (b.double() @ a.double()).float()
    return model


@pytest.mark.parametrize(
    ("settings", "scaling"), [({}, ALPHA / RANK), ({"use_rslora": True}, ALPHA / RANK**0.5)]
)
def test_model_of_an_adapter_is_its_base_and_the_product(tiny_model, tmp_path, settings, scaling):
    folder = write_adapter(tmp_path / "adapter", tiny_model, **settings)
    loaded = load(folder)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        wanted = merged(folder, scaling)(ids).logits
        torch.testing.assert_close(loaded.warm.model(ids).logits, wanted, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(tiny.model()(ids).logits, wanted, atol=0.1)
    assert loaded.warm.tokenizer("1+1=")["input_ids"] == tiny.tokenizer()("1+1=")["input_ids"]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"bias": "all"}, "bias all"),
        ({"r": 0}, "r 0"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(tiny_model, tmp_path, settings, problem):
    folder = write_adapter(tmp_path / "adapter", tiny_model, **settings)
    with pytest.raises(JobFailed, match=problem):
        load(folder)


def test_adapter_of_another_model_is_refused(tiny_model, tmp_path):
    folder = write_adapter(tmp_path / "adapter", tiny_model)
    for name, problem in (
        ("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", "no such linear layer"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "only A and B"),
    ):
        save_file({name: torch.zeros(RANK, 16)}, folder / "adapter_model.safetensors")
        with pytest.raises(JobFailed, match=problem):
            load(folder)


@pytest.fixture(scope="module")
def daemon(answering_daemon: Daemon) -> Daemon:
    return answering_daemon


def warm(daemon: Daemon) -> set[str]:
    return {model["name"] for model in daemon.status()["models"]}


def test_adapter_is_served_by_its_folder_and_compared_with_its_base(daemon, tiny_model, tmp_path):
    before = warm(daemon)
    folder = write_adapter(tmp_path / "adapter", tiny_model)
    full = tmp_path / "full"
    merged(folder, ALPHA / RANK).save_pretrained(full)
    tiny.tokenizer().save_pretrained(full)
    greedy = ["--temperature", "0", "--max-tokens", "12"]
    said = [
        warmd("run", "--model", model, *greedy, "1+1=", home=daemon.home.path).out
        for model in ("tiny", str(folder), str(full))
    ]
    assert said[1] == said[2] != said[0]
    done = warmd("compare", "--json", str(folder), "1+1=", *greedy, home=daemon.home.path)
    (row,) = done.objects
    assert (row["base"]["model"], row["trained"]["model"]) == ("tiny", "adapter")
    assert (row["base"]["text"], row["trained"]["text"]) == tuple(
        text.removesuffix("\n") for text in said[:2]
    )
    assert "tiny" in before
    assert warm(daemon) - before == {"adapter", "full"}


def test_adapter_whose_base_is_not_there_is_refused_in_the_shell(daemon, tmp_path):
    folder = write_adapter(tmp_path / "adapter", tmp_path / "gone")
    for arguments in (("run", "--model", str(folder), "a"), ("compare", str(folder), "a")):
        done = warmd(*arguments, home=daemon.home.path)
        assert done.is_refusal(2)
        assert "base_model_name_or_path" in done.err
