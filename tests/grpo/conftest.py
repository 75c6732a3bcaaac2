"""Fixtures of the GRPO tests."""

from __future__ import annotations

import pytest
from group_trainers import SharedSampler
from transformers.generation import utils as generation


@pytest.fixture
def shared_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "torch", SharedSampler())
