"""Adapters in PEFT's format: served, and compared with their base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import orjson
import peft
import pytest
import tiny
import torch
from adapters import IDS, lora, write_adapter
from daemons import Daemon
from needs import needs
from safetensors.torch import load_file, save_file
from shell import warmd

from warmd.configs.config import ModelConfig, WorkerConfig
from warmd.daemon.client import control
from warmd.daemon.fork.adapters import MergedModels
from warmd.daemon.fork.models import WarmModels
from warmd.daemon.host import fetch
from warmd.jobs.compute import levels, native, onednn
from warmd.jobs.errors import JobFailed, NotFound
from warmd.jobs.models.adapters import MERGED, WEIGHTS, model_folder

GREEDY = ("--temperature", "0", "--max-tokens", "12")


def write_plain(folder: Path, base: Path, **settings: Any) -> Path:
    """An adapter of plain LoRA, with some of its settings changed afterwards."""
    write_adapter(folder, base, lora())
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def load(folder: Path, **settings: Any) -> Any:
    config = ModelConfig(name="a", path=str(folder), **settings)
    return WarmModels(10**9).ensure(config, fetch.local_folder(config), in_use=())


def whole(loaded: Any) -> Any:
    """The model that a job gets which computes with no adapters, as all but infer jobs."""
    return MergedModels().of(loaded.warm).model


def logits_of(model: Any) -> Any:
    with torch.inference_mode():
        return model(IDS).logits


KINDS: dict[str, peft.PeftConfig] = {
    "ADALORA": peft.AdaLoraConfig(init_r=2, target_r=2, total_step=10, target_modules=["q_proj"]),
    "BOFT": peft.BOFTConfig(boft_block_size=4, target_modules=["q_proj"]),
    "FOURIERFT": peft.FourierFTConfig(n_frequency=10, target_modules=["q_proj"]),
    "HRA": peft.HRAConfig(r=2, target_modules=["q_proj"]),
    "IA3": peft.IA3Config(
        target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "LN_TUNING": peft.LNTuningConfig(target_modules=["norm"]),
    "LOHA": peft.LoHaConfig(r=2, target_modules=["q_proj"]),
    "LOKR": peft.LoKrConfig(r=2, target_modules=["q_proj"]),
    "LORA": lora(),
    "MISS": peft.MissConfig(r=2, target_modules=["q_proj"]),
    "OFT": peft.OFTConfig(oft_block_size=4, target_modules=["q_proj"]),
    "TRAINABLE_TOKENS": peft.TrainableTokensConfig(
        token_indices=[5, 7], target_modules=["embed_tokens"]
    ),
    "VERA": peft.VeraConfig(r=2, target_modules=["q_proj"]),
}  # fmt: skip
VARIANTS: dict[str, peft.PeftConfig] = {
    "rslora": lora(use_rslora=True),
    "dora": lora(use_dora=True),
    "ranks": lora(rank_pattern={"q_proj": 4}, alpha_pattern={"down_proj": 9}),
    "head": lora("q_proj", "lm_head"),  # the tiny model's is tied to its embeddings
    "embeddings": lora("q_proj", "embed_tokens"),
    "saved_head": lora(modules_to_save=["lm_head"]),
    "saved_embeddings": lora(modules_to_save=["embed_tokens"]),
    "saved_norm": lora(modules_to_save=["norm"]),
    "tokens": lora(trainable_token_indices=[5, 7]),
}


@pytest.mark.parametrize("config", (KINDS | VARIANTS).values(), ids=KINDS | VARIANTS)
def test_a_served_adapter_equals_peft(tiny_model, tmp_path, config):
    wanted = write_adapter(tmp_path / "adapter", tiny_model, config)
    assert not torch.allclose(logits_of(tiny.model()), wanted, atol=0.1)
    loaded = load(tmp_path / "adapter")
    model = whole(loaded)
    torch.testing.assert_close(logits_of(model), wanted, rtol=1e-5, atol=1e-5)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert loaded.warm.tokenizer("1+1=")["input_ids"] == tiny.tokenizer()("1+1=")["input_ids"]


def test_every_supported_adapter_kind_has_a_test():
    assert tuple(KINDS) == MERGED


def test_adapter_of_a_bfloat16_base_is_merged_with_the_rounding_of_bfloat16(tiny_model, tmp_path):
    write_adapter(tmp_path / "adapter", tiny_model, lora(), dtype=torch.bfloat16)
    exact = whole(load(tmp_path / "adapter", dtype="float32"))
    rounded = whole(load(tmp_path / "adapter", dtype="bfloat16"))
    for wanted, found in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert found.dtype == torch.bfloat16
        # The base, the change and their sum are rounded, each by 2**-9 of itself at most.
        torch.testing.assert_close(found.float(), wanted, rtol=2**-7, atol=2**-7)


def test_the_bases_file_and_its_warm_model_are_not_changed(tiny_model, tmp_path):
    models = WarmModels(10**9)
    base = models.ensure(ModelConfig(name="b", path=str(tiny_model)), tiny_model, in_use=())
    before = logits_of(base.warm.model)
    content = (tiny_model / "model.safetensors").read_bytes()
    folder = write_plain(tmp_path / "adapter", tiny_model)
    models.ensure(ModelConfig(name="a", path=str(folder)), folder, in_use=())
    assert torch.equal(logits_of(base.warm.model), before)
    assert (tiny_model / "model.safetensors").read_bytes() == content


@pytest.mark.parametrize(
    "config",
    [
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    ],
    ids=["PROMPT_TUNING", "PREFIX_TUNING"],
)
def test_an_adapter_without_weight_changes_is_refused_by_name(tiny_model, tmp_path, config):
    write_adapter(tmp_path / "adapter", tiny_model, config)
    with pytest.raises(
        JobFailed, match=f"peft_type must be one of .*, got {config.peft_type.value}"
    ):
        load(tmp_path / "adapter")


def test_an_adapter_that_peft_cannot_merge_is_refused_with_its_reason(tiny_model, tmp_path):
    write_adapter(tmp_path / "adapter", tiny_model, lora(lora_bias=True))
    with pytest.raises(JobFailed, match="the base layer has no bias"):
        load(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"peft_type": "XLORA"}, "peft_type must be one of .*, got XLORA"),
        ({"peft_type": None}, "peft_type must be one of .*, got None"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"megatron_config": {}, "megatron_core": "antigravity"}, None),
        (
            {"megatron_config": {"a": 1}, "megatron_core": "antigravity"},
            "megatron_config must be absent",
        ),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens must be absent"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication must be absent"),
        ({"of_next_year": False}, None),
        ({"of_next_year": True}, "of_next_year must be absent, as peft .* does not know it"),
        ({"r": 3}, "does not fit the model: size mismatch for .*lora_A.weight"),
        ({"r": 10**8}, "ranks must be at most .*, got 100000000"),
        ({"rank_pattern": {"q_proj": 10**8}}, "ranks must be at most .*, got 100000000"),
        ({"target_modules": ["q_proj"]}, "down_proj.*no place for it"),
        ({"target_modules": ["q_proj", "k_proj", "down_proj"]}, "has no .*k_proj"),
        ({"target_modules": ["nothing"]}, "nothing"),
        ({"base_model_name_or_path": None}, "must be a model's folder or hub id, got None"),
        ({"base_model_name_or_path": "../none"}, "no model folder there"),
        ({"base_model_name_or_path": "no one's"}, "no model folder there"),
        ({"base_model_name_or_path": "~nobody-here/base"}, "no model folder there"),
        ({"base_model_name_or_path": "org/x", "revision": "v\0"}, "revision must be the name of"),
        ({"base_model_name_or_path": "org/x", "revision": [1]}, "revision must be the name of"),
    ],
)
def test_settings_are_served_or_refused_in_one_line(tiny_model, tmp_path, settings, problem):
    folder = write_plain(tmp_path / "adapter", tiny_model, **settings)
    if problem is None:
        load(folder)
        return
    with pytest.raises((JobFailed, NotFound), match=problem) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_damaged_adapter_is_refused_with_the_reason(tiny_model, tmp_path):
    folder = write_plain(tmp_path / "adapter", tiny_model)
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in tensors if "lora_A" in name)
    for changed, problem in (
        (tensors | {name: torch.full_like(tensors[name], torch.nan)}, "NaNs detected"),
        (tensors | {name: torch.zeros(2, 17)}, f"does not fit the model: .*{name}"),
        ({"x": torch.zeros(9)}, "has x: the model has no place for it"),
    ):
        save_file(changed, folder / WEIGHTS)
        with pytest.raises(JobFailed, match=problem):
            load(folder)
    (folder / WEIGHTS).write_bytes(b"\0" * 100)
    with pytest.raises(JobFailed, match="cannot be loaded"):
        load(folder)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(NotFound, match=r"adapter_config\.json: must be a JSON object, got a list"):
        load(folder)


def test_pickled_adapter_is_not_read(tiny_model, tmp_path):
    folder = write_plain(tmp_path / "adapter", tiny_model)
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(JobFailed, match=r"it has no adapter_model\.safetensors"):
        load(folder)


def test_folder_of_a_model_and_an_adapter_is_refused(tiny_model, tmp_path):
    folder = write_plain(tmp_path / "adapter", tiny_model)
    shutil.copy(tiny_model / "config.json", folder)
    with pytest.raises(NotFound, match="only one of them can be meant"):
        load(folder)


@pytest.mark.parametrize("named", ["base", "./base", "models/base", "../base", "../models/base"])
def test_a_relative_base_is_looked_up_from_the_adapters_folder_upwards(tiny_model, tmp_path, named):
    """PEFT saves the path that the training was given, which counts from its working directory."""
    folder = tmp_path / "work" / "out" / "checkpoint-8"
    write_plain(folder, tiny_model, base_model_name_or_path=named)
    base = tmp_path / named.removeprefix("../").removeprefix("./")
    if not named.startswith("../"):
        base = tmp_path / "work" / named
    shutil.copytree(tiny_model, base)
    assert model_folder(folder) == base
    assert load(folder).rank == 2
    nearer = shutil.copytree(tiny_model, folder.parent / named)
    assert model_folder(folder) == nearer.resolve()


def test_a_relative_base_that_is_nowhere_is_refused_with_where_it_was_looked_for(
    tiny_model, tmp_path
):
    folder = write_plain(tmp_path / "one", tiny_model, base_model_name_or_path="./none")
    with pytest.raises(NotFound, match="no model folder there, seen from the adapter's folder and"):
        load(folder)


@pytest.fixture
def hub(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with the tiny model as org/tiny, the seventh seed as its revision v7."""
    repository = tmp_path / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    for name, letter in (("main", "a"), ("v7", "7")):
        (repository / "refs" / name).write_text(letter * 40)
    shutil.copytree(tiny_model, repository / "snapshots" / ("a" * 40))
    shutil.copytree(tiny_model, repository / "snapshots" / ("7" * 40))
    tiny.model(7).save_pretrained(repository / "snapshots" / ("7" * 40))
    monkeypatch.setenv("HF_HUB_CACHE", str(repository.parent))  # of processes that are started
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(repository.parent))
    return repository.parent


@pytest.mark.parametrize(("revision", "seed"), [(None, 0), ("v7", 7)])
def test_base_on_the_hub_is_found_in_its_cache(hub, tiny_model, tmp_path, revision, seed):
    named = {"base_model_name_or_path": "org/tiny", "revision": revision}
    folder = write_plain(tmp_path / "adapter", tiny_model, **named)
    own = tmp_path / "own"
    tiny.model(seed).save_pretrained(own)
    tiny.tokenizer().save_pretrained(own)
    same = write_plain(tmp_path / "same", tiny_model, base_model_name_or_path=str(own))
    found, wanted = (logits_of(whole(load(path))) for path in (folder, same))
    assert torch.equal(found, wanted)
    assert fetch.hub_id(ModelConfig(name="a", path=str(folder))) == (
        "org/tiny" if revision is None else "org/tiny@v7"
    )


def test_base_that_is_neither_here_nor_on_the_hub_is_refused(hub, tiny_model, tmp_path):
    folder = write_plain(tmp_path / "a", tiny_model, base_model_name_or_path="org/none")
    with pytest.raises(NotFound, match="org/none"):
        load(folder)
    with pytest.raises(ValueError, match="the hub's cache has none of that id"):
        model_folder(folder)


@pytest.fixture(scope="module")
def daemon(shared_daemon: Daemon) -> Daemon:
    return shared_daemon


def warm(daemon: Daemon) -> set[str]:
    return {model["name"] for model in daemon.status()["models"]}


def full_model(folder: Path, adapter: Path) -> Path:
    """The adapter merged into its base, by PEFT."""
    whole(load(adapter)).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def said(daemon: Daemon, model: str) -> str:
    return warmd("run", "--model", model, *GREEDY, "1+1=", home=daemon.home.path).out


def test_merging_leaves_no_threads_that_a_job_would_wait_for(daemon, tiny_model, tmp_path):
    write_adapter(tmp_path / "adapter", tiny_model, lora(use_dora=True))
    merged = ModelConfig(name="merged", path=str(tmp_path / "adapter"))
    threads = Path(f"/proc/{daemon.pid('zygote')}/task")
    before = set(threads.iterdir())
    assert control.load_model(daemon.config, merged)["merged"] == "use_dora"
    assert set(threads.iterdir()) == before
    assert daemon.wait(daemon.submit(model="merged"))["status"] == "finished"
    control.unload_model(daemon.config, "merged")


@pytest.mark.slow
def test_adapter_is_served_by_its_folder_and_compared_with_its_base(daemon, tiny_model, tmp_path):
    before = warm(daemon)
    folder, full = tmp_path / "adapter", tmp_path / "full"
    write_adapter(folder, tiny_model, lora("q_proj", "down_proj", "lm_head"))
    full_model(full, folder)
    texts = [said(daemon, model) for model in ("tiny", str(folder), str(full))]
    assert texts[1] == texts[2] != texts[0]
    done = warmd("compare", "--json", str(folder), "1+1=", *GREEDY, home=daemon.home.path)
    (row,) = done.objects
    assert (row["base"]["model"], row["trained"]["model"]) == ("tiny", "adapter")
    assert (row["base"]["text"], row["trained"]["text"]) == tuple(
        text.removesuffix("\n") for text in texts[:2]
    )
    assert "tiny" in before
    assert warm(daemon) - before == {"adapter", "full"}


@pytest.fixture
def int8_daemon(
    make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Daemon]:
    """A daemon on a processor that was measured to be faster with int8."""
    if onednn.has_exact_int8():
        kernel = "onednn"
    else:
        needs(native.is_available(), "numba")
        from warmd.jobs.compute.native import panels

        if not panels.has_int8():  # nothing that CI could install
            pytest.skip("no int8 kernel has exact sums on this processor, which lacks AVX2")
        kernel = "warmd"
    # The processor's own level and oneDNN's default: it computes as before, but is measured apart,
    # also from tests that run concurrently with this one and set only one of them.
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", torch.backends.cpu.get_cpu_capability().lower())
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "DEFAULT")
    measured = levels._path()
    assert measured is not None
    found = replace(levels.levels(), int8=kernel)
    measured.write_bytes(orjson.dumps(asdict(found)))
    infer = WorkerConfig(name="infer-0", queue="infer", isolation="resident", slots=4, threads=1)
    started = make_daemon(workers=(infer,))
    started.start()
    yield started
    measured.unlink()


@pytest.mark.nightly(
    part="oracles", catches="a comparison of an adapter in another precision than its base"
)
def test_adapter_is_compared_in_the_precision_that_its_base_was_loaded_with(
    int8_daemon, tiny_model, tmp_path
):
    daemon = int8_daemon
    base = shutil.copytree(tiny_model, tmp_path / "rough")
    folder = write_plain(tmp_path / "of-rough", base)
    home = daemon.home.path
    assert warmd("load", f"rough={base},precision=int8", home=home).code == 0
    (row,) = warmd("compare", "--json", str(folder), "1+1=", *GREEDY, home=home).objects
    for side in ("base", "trained"):
        assert daemon.client.jobs.result(row[side]["job"])["precision"] == "int8"
    for name in ("rough", "of-rough"):
        assert warmd("models", "--unload", name, home=home).code == 0


def test_training_may_start_from_an_adapter(daemon, tiny_model, tmp_path):
    folder = write_plain(tmp_path / "begun", tiny_model)
    job = daemon.wait(daemon.submit(model=str(folder)))
    assert job["status"] == "finished", job["error"]
    (weights,) = (daemon.home.runs / job["id"] / "model").glob("*.safetensors")
    trained, begun = load_file(weights), whole(load(folder)).state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert 0 < (trained[name] - begun[name]).abs().max() < 0.01


def test_an_adapter_without_its_base_is_refused_at_the_command_line(daemon, tiny_model, tmp_path):
    named = {"base_model_name_or_path": str(tmp_path / "gone")}
    folder = write_plain(tmp_path / "adapter", tiny_model, **named)
    for arguments in (("run", "--model", str(folder), "a"), ("compare", str(folder), "a")):
        done = warmd(*arguments, home=daemon.home.path)
        assert done.is_refusal(2)
        assert "base_model_name_or_path" in done.err


@pytest.mark.nightly(
    part="oracles", catches="an adapter whose base on the hub the daemon does not find"
)
def test_adapter_of_a_base_on_the_hub_is_served_and_compared(
    hub, make_daemon, tiny_model, tmp_path
):
    daemon = make_daemon(
        workers=(
            WorkerConfig(name="infer-0", queue="infer", isolation="resident", slots=4, threads=1),
        )
    )
    daemon.start()
    named = {"base_model_name_or_path": "org/tiny"}
    folder = write_plain(tmp_path / "adapter", tiny_model, **named)
    full = full_model(tmp_path / "full", folder)
    assert said(daemon, str(folder)) == said(daemon, str(full)) != said(daemon, "tiny")
    done = warmd("compare", "--json", str(folder), "1+1=", *GREEDY, home=daemon.home.path)
    (row,) = done.objects
    assert (row["base"]["model"], row["trained"]["model"]) == ("org--tiny", "adapter")
    assert row["base"]["text"] != row["trained"]["text"]
    write_plain(tmp_path / "b", tiny_model, base_model_name_or_path="org/none")
    done = warmd("load", str(tmp_path / "b"), home=daemon.home.path)
    assert done.is_refusal(2)
    assert "org/none" in done.err
