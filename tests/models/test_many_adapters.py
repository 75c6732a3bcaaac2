"""Many LoRA adapters on one warm base: one engine, one horse, no merged copies."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from adapters import lora, write_adapter
from daemons import Daemon
from gateways import openai_client
from safetensors.torch import load_file, save_file
from shell import warmd

from warmd.configs.config import ModelConfig
from warmd.daemon.fork.adapters import MergedModels
from warmd.daemon.fork.models import Loaded, WarmModels
from warmd.daemon.host import fetch
from warmd.daemon.lifecycle.view import JobFilter
from warmd.jobs.engine.engine import Engine
from warmd.jobs.engine.engines import engine_of
from warmd.jobs.engine.request import End, Request, Sampling
from warmd.jobs.errors import JobFailed, NotFound
from warmd.jobs.models.adapters import BASE_DIGEST, WEIGHTS

GREEDY = ("--temperature", "0", "--max-tokens", "12")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def ensure(models: WarmModels, name: str, folder: Path, **settings: Any) -> Loaded:
    config = ModelConfig(name=name, path=str(folder), **settings)
    return models.ensure(config, fetch.local_folder(config), in_use=())


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Ten adapters of the tiny model, of three shapes."""
    root = tmp_path_factory.mktemp("adapters")
    targets = (ALL, ("q_proj", "down_proj"), ("v_proj",))
    for number in range(10):
        config = lora(*targets[number % 3])
        write_adapter(root / f"a{number}", tiny_model, config, seed=number + 1)
    return [root / f"a{number}" for number in range(10)]


@pytest.fixture
def warm_ten(folders: Sequence[Path]) -> tuple[WarmModels, list[Loaded]]:
    models = WarmModels(10**9)
    return models, [ensure(models, folder.name, folder) for folder in folders]


def answers(engine: Engine, requested: Sequence[tuple[str, Any]]) -> list[str]:
    """The greedy texts of prompts with their adapters, submitted at once."""
    requests = []
    for prompt, adapter in requested:
        ids = tiny.tokenizer()(prompt)["input_ids"]
        sampling = Sampling(temperature=0)
        requests.append(Request(ids=ids, sampling=sampling, max_tokens=12, adapter=adapter))
        engine.submit(requests[-1])
    texts = []
    for request in requests:
        texts.append("")
        while not isinstance(piece := request.pieces.get(timeout=30), End):
            texts[-1] += piece.text
        assert piece.error is None
    return texts


@pytest.mark.slow
def test_ten_adapters_in_one_batch_answer_as_alone_and_as_merged(warm_ten):
    models, loaded = warm_ten
    engines = {id(engine_of(one.warm)) for one in loaded}
    assert len(engines) == 1
    engine = engine_of(loaded[0].warm)
    base = models.loaded["tiny"].warm
    requested = [(f"{n}+{n * 7 % 10}=", (None, *loaded)[n % 11]) for n in range(32)]
    whose = [(prompt, None if one is None else one.warm.adapter) for prompt, one in requested]
    together = answers(engine, whose)
    assert len(set(together)) > 10
    for item, text in zip(whose, together, strict=True):
        assert answers(engine, [item]) == [text]
    merged = MergedModels()
    for (prompt, one), text in zip(requested, together, strict=True):
        whole = base if one is None else merged.of(one.warm)
        assert answers(engine_of(whole), [(prompt, None)]) == [text]


@pytest.mark.slow
def test_ten_adapters_share_the_weights_of_one_base_and_map_their_own(warm_ten, folders):
    models, loaded = warm_ten
    base = models.loaded["tiny"]
    assert {one.base for one in loaded} == {"tiny"}
    assert all(one.warm.model is base.warm.model for one in loaded)
    assert all(one.warm.tokenizer is base.warm.tokenizer for one in loaded)
    for one, folder in zip(loaded, folders, strict=True):
        tensors = load_file(folder / WEIGHTS).values()
        assert one.size_bytes == sum(tensor.nbytes for tensor in tensors)
        assert one.num_parameters == sum(tensor.numel() for tensor in tensors)
        assert all(mapped_from(tensor) == folder / WEIGHTS for tensor in one.warm.adapter.tensors)
    assert base.is_for_adapters


def mapped_from(tensor: torch.Tensor) -> Path | None:
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, path = line.split()
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if begin <= tensor.data_ptr() < end:
            return Path(path)
    return None


@pytest.mark.nightly(
    part="oracles", catches="a base that stays in memory when the last of many adapters has gone"
)
def test_a_base_that_was_loaded_for_its_adapters_is_unloaded_with_the_last_one(warm_ten):
    models, loaded = warm_ten
    for one in loaded:
        assert "tiny" in models.loaded
        assert models.unload(one.config.name) == []
    assert not models.loaded


@pytest.mark.slow
def test_a_base_stays_until_its_last_adapter_is_unloaded(tiny_model, folders):
    models = WarmModels(10**9)
    base = ensure(models, "b", tiny_model)
    assert ensure(models, "x", folders[0]).base == "b"
    assert ensure(models, "y", folders[1]).base == "b"
    assert models.unload("b") == ["x", "y"]
    assert models.loaded["b"] is base
    models.unload("x")
    models.unload("y")
    assert not models.loaded
    ensure(models, "b", tiny_model)
    ensure(models, "x", folders[0])
    models.unload("x")
    assert list(models.loaded) == ["b"]  # it was loaded by itself
    with pytest.raises(NotFound, match="'x' is not warm"):
        models.unload("x")


@pytest.mark.slow
def test_adapters_are_unloaded_before_their_base_to_make_room(tiny_model, folders):
    size = ensure(WarmModels(10**9), "b", tiny_model).size_bytes
    other = tiny_model.parent / "other"
    if not other.exists():
        shutil.copytree(tiny_model, other)
    models = WarmModels(2 * size + 100)
    ensure(models, "b", tiny_model)
    ensure(models, "x", folders[2])
    ensure(models, "other", other)
    assert set(models.loaded) == {"b", "other"}
    config = ModelConfig(name="x", path=str(folders[0]))
    with pytest.raises(JobFailed, match="memory budget"):
        models.ensure(config, folders[0], in_use=("b", "other"))


def test_adapters_of_another_dtype_get_a_base_of_that_dtype(folders):
    models = WarmModels(10**9)
    one = ensure(models, "x", folders[0])
    other = ensure(models, "y", folders[0], dtype="bfloat16")
    assert (one.base, other.base) == ("tiny", "tiny-2")
    assert (one.dtype, other.dtype) == ("float32", "bfloat16")


def test_an_adapter_may_have_the_name_of_its_bases_folder(folders):
    models = WarmModels(10**9)
    loaded = ensure(models, "tiny", folders[0])
    assert loaded.base == "tiny-2"
    assert set(models.loaded) == {"tiny", "tiny-2"}


MERGED: dict[str, tuple[Any, str]] = {
    "dora": (lora(use_dora=True), "use_dora"),
    "head": (lora("q_proj", "lm_head"), "changes lm_head"),
    "saved": (lora(modules_to_save=["norm"]), "modules_to_save"),
    "embeddings": (lora("embed_tokens"), "changes embed_tokens"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("head", "embeddings") else ())
        for name in MERGED
    ],
)
def test_an_adapter_that_cannot_be_served_unmerged_is_merged_with_the_reason(
    tiny_model, tmp_path, name
):
    config, why = MERGED[name]
    write_adapter(tmp_path / "a", tiny_model, config)
    models = WarmModels(10**9)
    loaded = ensure(models, "a", tmp_path / "a")
    assert list(models.loaded) == ["a"]  # no base is left that was tried
    assert loaded.warm.adapter is None
    document = loaded.to_json()
    assert (document["base"], document["merged"], document["rank"]) == (None, why, 2)


def test_an_adapter_with_a_chat_template_shares_the_vocabulary(tiny_model, folders, tmp_path):
    folder = shutil.copytree(folders[0], tmp_path / "a")
    own = tiny.tokenizer()
    own.chat_template = "{{ messages[0].content }}"
    own.save_pretrained(folder)
    models = WarmModels(10**9)
    loaded = ensure(models, "a", folder)
    assert loaded.base is not None
    base = models.loaded[loaded.base].warm
    assert base.tokenizer.chat_template is None
    assert loaded.warm.tokenizer.chat_template == own.chat_template
    assert loaded.warm.tokenizer._tokenizer is base.tokenizer._tokenizer
    other = shutil.copytree(folders[0], tmp_path / "b")
    own.eos_token = "9"
    own.save_pretrained(other)
    assert ensure(models, "b", other).why_merged == "its tokenizer differs from the base's"


@pytest.mark.slow
def test_adapter_is_loaded_again_when_its_file_changes_and_its_base_stays(folders, tmp_path):
    folder = shutil.copytree(folders[0], tmp_path / "a")
    models = WarmModels(10**9)
    before = ensure(models, "a", folder)
    base = models.loaded["tiny"]
    assert ensure(models, "a", folder) is before
    shutil.copy(folders[3] / WEIGHTS, folder / "new")
    os.replace(folder / "new", folder / WEIGHTS)
    after = ensure(models, "a", folder)
    assert after is not before
    assert after.is_reloaded
    assert models.loaded["tiny"] is base
    assert after.weights != before.weights


@pytest.mark.slow
def test_a_base_that_changes_is_loaded_again_for_all_its_adapters(tiny_model, tmp_path):
    base = shutil.copytree(tiny_model, tmp_path / "base")
    for name in ("x", "y"):
        write_adapter(tmp_path / name, base, lora())
    models = WarmModels(10**9)
    old = [ensure(models, name, tmp_path / name) for name in ("x", "y")]
    tiny.model(7).save_pretrained(base)
    new = ensure(models, "x", tmp_path / "x")
    assert new.is_reloaded
    assert new.warm.model is not old[0].warm.model
    assert set(models.loaded) == {"base", "x"}  # the old base has gone with its adapters
    assert ensure(models, "y", tmp_path / "y").warm.model is new.warm.model


@pytest.mark.slow
def test_an_adapter_that_records_another_base_is_refused(tiny_model, folders, tmp_path):
    digest = ensure(WarmModels(10**9), "b", tiny_model).warm.weights_digest
    assert digest is not None
    folder = shutil.copytree(folders[0], tmp_path / "a")
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors, folder / WEIGHTS, {BASE_DIGEST: digest})
    ensure(WarmModels(10**9), "a", folder)
    save_file(tensors, folder / WEIGHTS, {BASE_DIGEST: "xxh3:0"})
    with pytest.raises(JobFailed, match="trained on a base whose weights have the digest xxh3:0"):
        ensure(WarmModels(10**9), "a", folder)
    base = tmp_path / "larger"
    model = tiny.model(positions=64)
    model.config.num_hidden_layers = 1
    model.model.layers = model.model.layers[:1]
    model.save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    other = shutil.copytree(folders[0], tmp_path / "c")
    settings = json.loads((other / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(base)
    (other / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(JobFailed, match=r"layers\.1.*the model has no place for it"):
        ensure(WarmModels(10**9), "c", other)


# --- In a daemon ----------------------------------------------------------------------------


@pytest.mark.slow
def test_adapters_are_loaded_listed_and_served_by_one_horse(shared_daemon: Daemon, folders):
    home = shared_daemon.home.path
    for folder in folders[:3]:
        assert warmd("load", f"m-{folder.name}={folder}", home=home).code == 0
    listed = {model["name"]: model for model in warmd("models", "--json", home=home).objects}
    assert [listed[f"m-a{n}"]["base"] for n in range(3)] == ["tiny"] * 3
    assert [listed[f"m-a{n}"]["rank"] for n in range(3)] == [2, 2, 2]
    table = warmd("models", home=home).out
    assert "rank 2 on tiny" in table
    names = ["tiny", "m-a0", "m-a1", "m-a2"]
    found = [warmd("run", "--model", name, *GREEDY, "1+1=", home=home).out for name in names]
    assert len(set(found)) == 4
    jobs = shared_daemon.client.jobs.all(JobFilter(statuses=("finished",)))[: len(names)]
    pids = [e["pid"] for job in jobs for e in shared_daemon.events(job["id"], "started")]
    assert pids == pids[:1] * len(names)  # each has run once
    requested: dict[str, Any] = {"prompt": "1+1=", "max_tokens": 12, "temperature": 0}
    with openai_client(shared_daemon.status()["http"]["url"]) as client:
        for name, text in zip(names, found, strict=True):
            done = client.completions.create(model=name, **requested)
            assert done.choices[0].text == text.removesuffix("\n")
    for name in names[1:]:
        assert warmd("models", "--unload", name, home=home).code == 0
    assert "tiny" in warmd("models", home=home).out
    done = warmd("run", "--model", "m-a0", "x", home=home)
    assert done.is_refusal(2)
