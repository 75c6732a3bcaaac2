"""The models that a daemon loads when it starts again, and their names."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from warmd.configs.config import DaemonConfig, ModelConfig
from warmd.daemon.client import checking
from warmd.daemon.host.home import Home
from warmd.daemon.host.warm_set import WarmSet, known_models, on_demand_models
from warmd.jobs import spec_class
from warmd.jobs.errors import SpecError

CONFIGURED = ModelConfig(name="configured", path="/models/configured")
LOADED = ModelConfig(name="loaded", path="/models/loaded")
ONCE = ModelConfig(name="once", path="/models/once")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.create()
    return home


def names(warm_set: WarmSet) -> set[str]:
    return {model.name for model in warm_set.models()}


def test_a_loaded_model_is_loaded_after_restarts_until_it_is_unloaded(home):
    first = WarmSet(home, [CONFIGURED], "first")
    first.add(LOADED, is_kept=True)
    first.add(ONCE, is_kept=False)
    assert names(WarmSet(home, [CONFIGURED], "first")) == {"configured", "loaded", "once"}
    second = WarmSet(home, [CONFIGURED], "second")
    second.write()
    assert names(second) == {"configured", "loaded"}
    assert [second.is_required(name) for name in ("configured", "loaded")] == [True, False]
    third = WarmSet(home, [CONFIGURED], "third")
    assert names(third) == {"configured", "loaded"}
    third.discard("loaded")
    third.discard("configured")
    assert names(WarmSet(home, [CONFIGURED], "fourth")) == {"configured"}


def test_the_file_has_every_change_of_two_threads(home):
    # A reply to `models --unload`, and the zygote's report of what is loaded, arrive together.
    warm_set = WarmSet(home, [CONFIGURED], "first")
    with ThreadPoolExecutor(2) as pool:
        for _ in range(50):
            warm_set.note_loaded([CONFIGURED, LOADED])
            warm_set.add(LOADED, is_kept=True)
            noted = pool.submit(warm_set.note_loaded, [CONFIGURED])
            discarded = pool.submit(warm_set.discard, "loaded")
            noted.result()
            assert discarded.result()
            assert set(known_models(home)) == {"configured"}


def test_the_settings_override_a_loaded_model_of_the_same_name(home):
    WarmSet(home, [], "first").add(
        ModelConfig(name="configured", path="/models/other"), is_kept=True
    )
    assert WarmSet(home, [CONFIGURED], "second").models() == [CONFIGURED]


def test_a_file_of_an_earlier_version_is_read(home):
    home.models.write_text('{"life": "a", "models": [{"name": "m", "path": "/models/m"}]}')
    assert set(known_models(home)) == {"m"}
    assert names(WarmSet(home, [CONFIGURED], "b")) == {"configured"}


def test_a_model_that_was_loaded_for_a_job_is_known_by_its_name(home, tmp_path, monkeypatch):
    folder = tmp_path / "stories"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    on_demand = ModelConfig(name="stories", path=str(folder))
    config = DaemonConfig(home=home.path, models=(), http_port=None)
    spec = spec_class("infer").parse({"model": "stories", "prompt": "a"})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(SpecError, match="must be a warm model"):
        checking.document_of(spec, config, init=None, model=None)
    warm_set = WarmSet(home, [CONFIGURED], "first")
    warm_set.note_loaded([CONFIGURED, on_demand, ModelConfig(name="job:init", path="/x")])
    assert set(on_demand_models(home)) == {"stories"}
    document = checking.document_of(spec, config, init=None, model=None)
    assert document["model"]["path"] == str(folder)
    (elsewhere / "stories").mkdir()
    (elsewhere / "stories" / "config.json").write_text("{}")
    document = checking.document_of(spec, config, init=None, model=None)
    assert document["model"]["path"] == str(elsewhere / "stories")
