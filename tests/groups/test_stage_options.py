"""The shipped profile of a curriculum."""

from __future__ import annotations

from pathlib import Path

from warmd import configs
from warmd.configs.yamlfile import read_mapping
from warmd.daemon.groups.stage_options import gate_of, stages_of
from warmd.jobs.eval.options import EvalSpec
from warmd.jobs.grpo.options import GrpoSpec

PROFILE = Path(configs.__file__).parent / "profiles" / "gsm8k_curriculum.yaml"


def test_the_shipped_profile_has_three_valid_stages_and_a_valid_gate():
    values = {str(name): value for name, value in read_mapping(PROFILE).items()}
    stages, gate = stages_of(values.pop("stages")), gate_of(values.pop("gate"))
    specs = [GrpoSpec.parse({**values, **stage.options}) for stage in stages]
    assert [(spec.steps_total, spec.learning_rate) for spec in specs] == [
        (40, 1e-5),
        (80, 5e-6),
        (80, 2e-6),
    ]
    assert gate is not None
    assert EvalSpec.parse({**gate.options, "samples": gate.questions}).task == "gsm8k"
