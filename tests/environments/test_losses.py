"""Losses on episodes: those of TRL's trainer, which gets the same tokens, masks and rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import AutoModelForCausalLM

from warmd.jobs.context import WarmModel
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.verify_trl.training import verify

FOLDER = str(Path(__file__).parent)
STEPS = 4

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.1},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo", "beta": 0.1, "lora": 2},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "entropy quantile": {"top_entropy_quantile": 0.4},
    "off-policy mask": {"off_policy_mask_threshold": 0.1},
    "delta": {"delta": 2.0, "loss_type": "grpo"},
}
# A loss is a mean of terms of about this size and rounds by it: CISPO and VESPO multiply advantages
# by log-probabilities, about -ln(81). TRL's own VESPO differs by 4.5e-6 from that of its model in
# float64.
TERMS = {"cispo": 4.4, "vespo": 4.4}
OTHERS = pytest.mark.nightly(part="oracles", catches="a loss that differs from TRL's on episodes")
CASES = [
    pytest.param(loss, rounds, marks=[] if (loss, rounds) == ("grpo", 2) else OTHERS)
    for loss in LOSSES
    for rounds in (1, 2)
]


@pytest.mark.parametrize(("loss", "rounds"), CASES)
def test_steps_on_episodes_are_those_of_trl(tmp_path, tiny_model, loss, rounds):
    spec = GrpoSpec.parse(
        {
            "environment": "games:Digits",
            "samples": 8,
            "prompts_per_step": 2,
            "num_generations": 4,
            "batch_size": 4,
            "max_turn_length": 6,
            "stop": [*"abcdefghijklmnopqrstuvwxyz "],
            "learning_rate": 1e-3,
            "num_iterations": rounds,
            **LOSSES[loss],
        }
    )

    def read() -> WarmModel:
        model = AutoModelForCausalLM.from_pretrained(tiny_model).eval().requires_grad_(False)
        return WarmModel(name="demo", path=tiny_model, model=model, tokenizer=tiny.tokenizer())

    (tmp_path / "scratch").mkdir()
    found = verify(
        spec,
        read,
        job_id="grpo-20261128-060000-x7f2",
        scratch=tmp_path / "scratch",
        rules=3,
        code_folders=(FOLDER,),
        steps=STEPS,
        report=lambda words: None,
    )
    assert found["differences"] == []
    assert found["changed"] == []
    assert len(found["steps"]) == STEPS
    norms = [one["warmd"]["grad_norm"] for one in found["steps"]]
    assert max(norms) > 0
    for one in found["steps"]:
        for name, size in (("loss", TERMS.get(loss, 1.0)), ("grad_norm", 1.0)):
            assert one["warmd"][name] == pytest.approx(one["trl"][name], rel=1e-5, abs=2e-6 * size)
