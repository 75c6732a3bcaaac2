"""The argument of `warmd load`: the name of a known model, a folder or a hub id."""

from __future__ import annotations

from pathlib import Path

import pytest

from warmd.configs.config import load
from warmd.configs.entries import ModelConfig
from warmd.configs.values import ConfigError
from warmd.daemon.client.control import named_model
from warmd.daemon.host.home import Home
from warmd.daemon.host.warm_set import WarmSet


def test_a_model_is_named_by_name_path_or_hub_id(tmp_path: Path):
    config = load(home=tmp_path / "home", environ={})
    (tmp_path / "tiny").mkdir()
    found = {
        text: (model.name, model.path)
        for text in ("demo", f"{tmp_path}/tiny", f"t={tmp_path}/tiny", "Qwen/Qwen2-0.5B")
        for model in [named_model(config, text)]
    }
    assert found == {
        "demo": ("demo", "builtin:demo"),
        f"{tmp_path}/tiny": ("tiny", f"{tmp_path}/tiny"),
        f"t={tmp_path}/tiny": ("t", f"{tmp_path}/tiny"),
        "Qwen/Qwen2-0.5B": ("Qwen2-0.5B", "Qwen/Qwen2-0.5B"),
    }
    with pytest.raises(ConfigError, match=r"^model\.path: must be a local folder, a hub id"):
        named_model(config, "t=")


def test_the_name_of_a_loaded_model_loads_that_one_again(tmp_path: Path):
    config = load(home=tmp_path / "home", environ={})
    home = Home(config.home)
    home.create()
    tiny = ModelConfig(name="tiny", path=str(tmp_path), precision="int8")
    WarmSet(home, config.models, "life").add(tiny, is_kept=True)
    assert named_model(config, "tiny") == tiny
