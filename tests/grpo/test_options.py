"""The options of the GRPO kind: their meaning, and combinations that are refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
from grpo_jobs import spec

from warmd.jobs import spec_class
from warmd.jobs.errors import SpecError
from warmd.jobs.grpo.options import GrpoSpec

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


def test_every_option_has_help_and_the_defaults_are_a_valid_job():
    assert spec_class("grpo") is GrpoSpec
    assert all(info.help for info in GrpoSpec.options().values())
    defaults = GrpoSpec.parse({})
    assert defaults.steps_total == 80
    assert GrpoSpec.parse(defaults.to_json()) == defaults
    defaults.check_inputs(None)


def test_the_command_line_can_read_the_options_without_torch():
    code = "import sys, warmd.jobs.grpo.options as g; g.GrpoSpec.options()"
    code += "; print('torch' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.stdout == "False\n", child.stderr


@pytest.mark.parametrize(
    ("options", "geometry", "steps_total"),
    [
        ({}, (8, 1), 80),
        ({"num_generations": 2}, (2, 1), 80),
        ({"num_generations": 12}, (6, 2), 80),
        ({"num_generations": 2, "batch_size": 1, "gradient_accumulation": 2}, (1, 2), 80),
        ({"num_generations": 4, "batch_size": 2}, (2, 2), 80),
        ({"num_generations": 4, "gradient_accumulation": 4}, (1, 4), 80),
        ({"prompts_per_step": 3, "num_generations": 4}, (6, 2), 26),
        ({"prompts_per_step": 3, "epochs": 2, "num_iterations": 2}, (8, 3), 104),
        ({"epochs": 3, "steps": 100}, (8, 1), 100),
    ],
)
def test_one_step_is_the_groups_of_its_prompts(options, geometry, steps_total):
    parsed = GrpoSpec.parse(options)
    assert parsed.geometry == geometry
    assert parsed.steps_total == steps_total


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_generations": 1},
            "num_generations: must be an integer of at least 2 and at most 4096, got 1",
        ),
        (
            {"num_generations": 4, "batch_size": 3},
            "batch_size: must divide the 4 completions of a step "
            "(prompts_per_step x num_generations), got 3",
        ),
        (
            {"num_generations": 4, "gradient_accumulation": 3},
            "gradient_accumulation: must divide the 4 completions of a step "
            "(prompts_per_step x num_generations), got 3",
        ),
        (
            {"num_generations": 4, "batch_size": 4, "gradient_accumulation": 2},
            "gradient_accumulation: must be 1, to make the 4 completions of a step "
            "(prompts_per_step x num_generations) with a batch_size of 4, got 2",
        ),
        (
            {"samples": 4, "prompts_per_step": 5},
            "prompts_per_step: must be at most 4 (samples), got 5",
        ),
        (
            {"lr_scheduler": "constant", "warmup_steps": 10},
            "warmup_steps: must not be above 0 with lr_scheduler constant, got 10 with "
            "lr_scheduler constant",
        ),
        (
            {"system": "Be brief."},
            "system: must go with chat_template, got 'Be brief.' with chat_template false",
        ),
        ({"reward": []}, "reward: must be one or more, each once, got none"),
        (
            {"reward": ["math", "math=2"]},
            "reward: must be one or more, each once, got math, math",
        ),
        (
            {"delta": 1.5, "loss_type": "sapo"},
            "delta: must go with loss_type dapo, bnpo, grpo, dr_grpo or luspo, got 1.5 "
            "with loss_type sapo",
        ),
        (
            {"vespo_k_pos": 1},
            "vespo_k_pos: must go with loss_type vespo, got 1.0 with loss_type dapo",
        ),
        (
            {"ref_model_sync_steps": 8},
            "ref_model_sync_steps: must go with beta above 0, got 8 with beta 0.0",
        ),
        (
            {"lora": 4, "beta": 0.1, "ref_model_sync_steps": 8},
            "ref_model_sync_steps: must not go with lora, got 8 with lora 4",
        ),
        (
            {"entropy_coef_max": 0.5},
            "entropy_coef_max: must go with entropy_target, got 0.5 with entropy_target none",
        ),
        (
            {"entropy_coef_min": 2, "entropy_target": 1},
            "entropy_coef_min: must be at most 1 (entropy_coef_max), got 2",
        ),
    ],
)
def test_options_that_do_not_fit_together_are_refused_by_name(options, message):
    with pytest.raises(SpecError) as caught:
        GrpoSpec.parse(options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": ["no_such_module:f"]}, "reward: no_such_module:f must import"),
        ({"report_to": ["trackio"]}, "report_to: must be installed, got trackio"),
        (
            {"max_prompt_length": 60},
            "max_completion_length: must be at most 4 "
            "(demo has 64 positions, the prompt takes 60), got 6",
        ),
        (
            {"max_completion_length": 4000},
            "max_completion_length: must be at most 63 "
            "(demo has 64 positions, the prompt takes 1), got 4000",
        ),
        ({"max_prompt_length": 64}, "max_prompt_length: must be below 64 (the positions of demo)"),
        ({"samples": 100_000}, "samples: must be at most"),
        ({"eval_samples": 100_000}, "eval_samples: must be at most"),
        ({"dataset": "nowhere.jsonl"}, "dataset: must be a JSONL, CSV or Parquet file"),
        ({"template": "no place"}, "template: must be as-is, math, qa, or contain {question}"),
    ],
)
def test_inputs_that_cannot_work_are_refused_before_they_are_queued(options, message):
    with pytest.raises(SpecError) as caught:
        spec(**options).check_inputs({"max_position_embeddings": 64})
    assert str(caught.value).startswith(message)


def test_all_prompts_of_a_data_set_must_be_enough_for_a_step(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    job = spec(dataset="a.jsonl", samples="all", prompts_per_step=3, steps=4)
    with pytest.raises(SpecError) as caught:
        job.located(tmp_path)
    assert str(caught.value) == "prompts_per_step: must be at most 2 (samples), got 3"


def test_a_path_is_that_of_the_shell_it_was_written_in(tmp_path):
    assert spec(dataset="a.jsonl").located(tmp_path).dataset == str(tmp_path / "a.jsonl")
    assert spec(dataset="/a.jsonl").located(tmp_path).dataset == "/a.jsonl"
    assert spec().located(tmp_path).source == "arithmetic"
