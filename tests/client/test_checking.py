"""Checks of a model's folder before a job on it is queued."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from warmd.configs.config import DaemonConfig, ModelConfig
from warmd.daemon.client.checking import document_of, resolve_model
from warmd.daemon.client.control import named_model
from warmd.daemon.client.trained import check_name, trained_by
from warmd.daemon.host.home import Home
from warmd.daemon.runs import labels
from warmd.daemon.runs.labels import Labels
from warmd.daemon.runs.rundir import RunDir
from warmd.jobs import spec_class
from warmd.jobs.errors import NotFound, SpecError
from warmd.jobs.mlm.options import read_architecture
from warmd.jobs.models.model_types import known_types

CHAT = {"messages": '[{"role": "user", "content": "a"}]'}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with the files that the checks read."""
    folder = tmp_path / "m"
    folder.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_bytes(orjson.dumps(config))
    return folder


def check(kind: str, folder: Path, options: dict[str, Any], *, task: str = "auto") -> None:
    model = ModelConfig(name="m", path=str(folder), task=task)
    spec = spec_class(kind).parse({"model": "m", **options})
    document_of(spec, DaemonConfig(home=folder.parent / "home"), init=None, model=model)


def test_a_chat_is_accepted_if_the_tokenizer_has_a_template(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(SpecError, match=r"^messages: .* got m, whose tokenizer has none"):
        check("infer", folder, CHAT)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    check("infer", folder, CHAT)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    check("infer", folder, CHAT)


@pytest.mark.parametrize("model_type", ["own", "", 3, [], {}, True, "o" * 10_000, "LlamaConfig"])
def test_a_type_of_model_that_transformers_does_not_know_is_refused(folder, model_type):
    config = {"model_type": model_type, "auto_map": {"AutoConfig": "own.Config"}}
    (folder / "config.json").write_bytes(orjson.dumps(config))
    (folder / "own.py").write_text("raise SystemExit")
    with pytest.raises(SpecError, match=r"^model: must have a model_type .*auto_map") as refused:
        check("infer", folder, {"prompt": "a"})
    assert len(str(refused.value)) < 300
    with pytest.raises(SpecError, match=r"^architecture: must have a model_type"):
        read_architecture(str(folder))


def test_all_types_of_models_that_transformers_knows_are_known():
    from transformers import CONFIG_MAPPING

    assert set(CONFIG_MAPPING.keys()) <= known_types()
    assert "own" not in known_types()


def test_a_model_is_judged_by_its_class_unless_its_task_is_configured(folder):
    (folder / "data.txt").write_text("some text")
    config = {"model_type": "bert", "architectures": ["BertModel"]}
    (folder / "config.json").write_bytes(orjson.dumps(config))
    options = {"objective": "mlm", "data": str(folder / "data.txt")}
    with pytest.raises(SpecError, match=r"^model: must have a head for masked tokens"):
        check("mlm", folder, options)
    check("mlm", folder, options, task="masked-lm")  # which gives it a head


@pytest.mark.parametrize("name", ["/nope", "./nope", "~/nope"])
def test_a_path_without_a_folder_is_refused_with_that_reason(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=r"^model: must be a model folder, got .*: no such folder$"):
        resolve_model(name, DaemonConfig(home=tmp_path / "home"))


def test_a_file_is_refused_as_a_model_folder(folder):
    path = str(folder / "config.json")
    with pytest.raises(SpecError, match=r"^model: must be a model folder, got .*: a file$"):
        resolve_model(path, DaemonConfig(home=folder.parent / "home"))


def test_the_name_of_a_job_is_the_model_that_it_has_trained(tmp_path):
    home = Home(tmp_path / "home")
    config = DaemonConfig(home=home.path)
    first, second, untrained = (f"grpo-20261124-12501{n}-aaaa" for n in range(3))
    for job_id in (first, second, untrained):
        (home.runs / job_id).mkdir(parents=True)
        labels.write(RunDir(home.runs / job_id), Labels(name="better"))
    (home.runs / first / "model").mkdir()
    trained = ModelConfig(name=first, path=str(home.runs / first / "model"))
    assert resolve_model("better", config) == trained
    assert resolve_model(first, config) == trained
    (home.runs / second / "model").mkdir()
    with pytest.raises(SpecError, match=r"^model: 'better' is the name of 2 trained jobs: "):
        resolve_model("better", config)
    labels.write(RunDir(home.runs / first), Labels(name="rates/1"))
    assert resolve_model("rates/1", config) == trained
    assert resolve_model("rates/2", config).path == "rates/2"  # a hub id
    for text in ("warm=rates/1", f"warm={first}"):
        assert named_model(config, text) == replace(trained, name="warm")


PARTS: dict[str, Any] = {"id": "", "kind": "grpo", "revision": 1, "spec": {}}


def training(home: Home, slot: int, *, name: str | None = None, **document: Any) -> str:
    """Make the run directory of a training that has a model; return its id."""
    job_id = f"grpo-20261124-1250{slot:02}-aaaa"
    rundir = RunDir(home.runs / job_id)
    (rundir.path / "model").mkdir(parents=True)
    rundir.path.joinpath("spec.json").write_bytes(orjson.dumps({"schema": 1, **PARTS, **document}))
    labels.write(rundir, Labels(name=name))
    return job_id


def test_a_hyphen_is_the_latest_training_of_the_command_line(tmp_path):
    home = Home(tmp_path / "home")
    config = DaemonConfig(home=home.path)
    with pytest.raises(NotFound, match=r"^model: `-` is the latest training, and .* has none yet$"):
        resolve_model("-", config)
    training(home, 1)
    typed = training(home, 2, origin="cli")
    requested = training(home, 3, origin="http")
    training(home, 4, origin="check")
    (home.runs / "infer-20261124-125059-aaaa").mkdir()  # an answer is no training
    assert resolve_model("-", config).name == typed
    found = trained_by(config, "-", of_http=True)
    assert found is not None
    assert found.name == requested
    (home.runs / typed / "model").rmdir()
    with pytest.raises(NotFound, match=f"^job: {typed} has neither a final model nor a checkpoint"):
        resolve_model("-", config)


def test_a_name_of_a_training_without_a_model_is_no_hub_id(tmp_path):
    home = Home(tmp_path / "home")
    job_id = training(home, 1, name="rates/1")
    (home.runs / job_id / "model").rmdir()
    with pytest.raises(NotFound, match=f"^job: {job_id} has neither a final model"):
        resolve_model("rates/1", DaemonConfig(home=home.path))


@pytest.mark.parametrize("name", ["warm", "first@5", "-@5"])
def test_a_name_that_would_mean_something_else_is_refused(tmp_path, name):
    config = DaemonConfig(home=tmp_path, models=(ModelConfig(name="warm", path="/m"),))
    check_name(config, None)
    check_name(config, "lr@1e-5")
    with pytest.raises(SpecError, match=r"^name: must be another word than "):
        check_name(config, name)
