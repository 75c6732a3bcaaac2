"""Every field of TRL's GRPOConfig has an option or one value, or is refused, as documented."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
from trl.trainer.grpo_config import GRPOConfig

from warmd.jobs.errors import SpecError
from warmd.jobs.grpo.loss_options import LossSpec
from warmd.jobs.grpo.options import GrpoSpec

MANUAL = Path(__file__).parents[2] / "docs" / "grpo.md"
FIELDS = {field.name for field in fields(GRPOConfig)}


def tables() -> list[dict[str, str]]:
    """The three tables of the manual: field -> what stands next to it."""
    _, _, section = MANUAL.read_text().partition("## From a TRL script")
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        rows = [line.split(" | ", 1) for line in table.splitlines()[2:]]
        found.append({name: about for cell, about in rows for name in re.findall("`(.+?)`", cell)})
    return found


@pytest.mark.skipif(
    not hasattr(GRPOConfig, "activation_checkpointing"), reason="transformers before 5.23"
)
def test_no_field_of_trls_config_is_missing_from_the_manual_or_named_twice():
    named = Counter(name for table in tables() for name in table)
    assert FIELDS - named.keys() == set()
    assert named.keys() - FIELDS == set()
    assert [name for name, count in named.items() if count > 1] == []


def test_an_option_that_the_manual_names_exists():
    options = tables()[0]
    spelt = {"--" + name.replace("_", "-") for name in GrpoSpec.options()}
    for name, about in options.items():
        named = re.findall(r"`(--[a-z-]+)", about)
        if "the same" in about:
            assert name in GrpoSpec.options()
        assert named or "the same" in about or "warmd resume" in about, name
        assert set(named) <= spelt, name


def test_a_field_without_an_option_is_refused_by_its_name():
    _, fixed, refused = tables()
    for name in (*fixed, *refused):
        with pytest.raises(SpecError, match=f"^{name}: unknown option of grpo"):
            GrpoSpec.parse({name: 1})


def test_the_default_of_each_loss_option_is_trls():
    ours = GrpoSpec().loss_arguments()
    assert ours == {name: getattr(GRPOConfig, name) for name in ours}
    assert ours.keys() >= LossSpec.options().keys() - {"entropy_target", "ref_model_sync_steps"}
