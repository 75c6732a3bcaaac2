"""The part of the memory budget for packed copies of the weights."""

from __future__ import annotations

from warmd.configs.config import ModelConfig
from warmd.daemon.fork.models import WarmModels
from warmd.daemon.fork.reading import stored_bytes


def test_models_may_pack_as_long_as_the_budget_has_room_for_the_copies(tiny_model):
    one = stored_bytes(tiny_model, "float32")
    models = WarmModels(5 * one)
    found = [
        models.ensure(ModelConfig(name=name, path=str(tiny_model)), tiny_model, in_use=())
        for name in ("a", "b", "c")
    ]
    assert [loaded.warm.may_pack for loaded in found] == [True, True, False]
    assert len(models.loaded) == 3  # a copy that may be made puts no model out
