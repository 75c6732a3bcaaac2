"""The GRPO kind: options that fit together, training that learns, and a resume without a trace."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from warmd.daemon.runs.checkpoints import Checkpoints
from warmd.jobs import spec_class
from warmd.jobs.compute import aten_overrides
from warmd.jobs.errors import JobFailed, SpecError, Stopped
from warmd.jobs.grpo.kind import run
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.models import chat_templates

TIMES = {"generation_s", "training_s"}


pytestmark = pytest.mark.usefixtures("like_a_work_horse")


def spec(**options: Any) -> GrpoSpec:
    """A job of 6 steps of a tiny model, rewarded for digits."""
    small = {
        "samples": 6,
        "num_generations": 4,
        "max_completion_length": 6,
        "reward": ["tiny:digit_share"],
        "learning_rate": 1e-2,
        "save_every": 3,
        "keep": 100,
    }
    return GrpoSpec.parse(small | options)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return dict(model.state_dict())


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def steps(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The step events by step, without what the clock says."""
    return {
        event["step"]: {key: event[key] for key in event.keys() - TIMES}
        for event in events
        if event["type"] == "step"
    }


def rows(path: Path, *content: dict[str, Any]) -> str:
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in content))
    return str(path)


# Options.


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
            "lr_scheduler: must be constant_with_warmup or another for 10 warmup_steps, "
            "got constant",
        ),
        ({"system": "Be brief."}, "system: must go with chat_template, got it alone"),
        ({"reward": []}, "reward: must be one or more, each once, got none"),
        (
            {"reward": ["math", "math=2"]},
            "reward: must be one or more, each once, got math, math",
        ),
        (
            {"delta": 1.5, "loss_type": "sapo"},
            "delta: must go with loss_type dapo, bnpo, grpo, dr_grpo or luspo, got 1.5 without it",
        ),
        (
            {"vespo_k_pos": 1},
            "vespo_k_pos: must go with loss_type vespo, got 1.0 without it",
        ),
        (
            {"ref_model_sync_steps": 8},
            "ref_model_sync_steps: must go with beta above 0, got 8 without it",
        ),
        (
            {"lora": 4, "beta": 0.1, "ref_model_sync_steps": 8},
            "ref_model_sync_steps: must be left out with lora, whose reference is the model "
            "without the adapter, got 8",
        ),
        (
            {"entropy_coef_max": 0.5},
            "entropy_coef_max: must go with entropy_target, got 0.5 without it",
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
        ({"max_prompt_length": 60}, "max_completion_length: must be at most 64"),
        ({"samples": 100_000}, "samples: must be at most"),
        ({"eval_samples": 100_000}, "eval_samples: must be at most"),
        ({"dataset": "nowhere.jsonl"}, "dataset: must be a JSONL, CSV or Parquet file"),
        ({"template": "no place"}, "template: must contain {question}"),
    ],
)
def test_inputs_that_cannot_work_are_refused_before_they_are_queued(options, message):
    with pytest.raises(SpecError) as caught:
        spec(**options).check_inputs({"max_position_embeddings": 64})
    assert str(caught.value).startswith(message)


def test_a_path_is_that_of_the_shell_it_was_written_in(tmp_path):
    assert spec(dataset="a.jsonl").located(tmp_path).dataset == str(tmp_path / "a.jsonl")
    assert spec(dataset="/a.jsonl").located(tmp_path).dataset == "/a.jsonl"
    assert spec().located(tmp_path).dataset == "arithmetic"


# Training.


def test_training_raises_the_reward_on_held_out_prompts(tmp_path):
    job = tiny.surroundings(tmp_path)
    result = run(spec(samples=40, num_generations=8, eval_samples=50), job.ctx)
    assert result["steps"] == 40
    assert result["reward_after"] > result["reward_before"] + 0.2
    before, after = job.of_type("eval")
    assert (before["phase"], before["step"], before["n"]) == ("before", 0, 50)
    assert (after["phase"], after["step"], after["reward"]) == ("after", 40, result["reward_after"])


def test_each_step_is_one_event_with_everything_that_happened_in_it(tmp_path):
    job = tiny.surroundings(tmp_path)
    result = run(
        spec(reward=["tiny:digit_share", "correctness=0.5"], beta=0.1, log_completions=3), job.ctx
    )
    (begin,) = job.of_type("begin")
    assert begin["steps_total"] == 6
    assert begin["resumed_from"] is None
    assert begin["threads"] == 1
    assert begin["gemm"] == (job.ctx.run_dir / "gemm").read_text()
    events = job.of_type("step")
    assert [event["step"] for event in events] == [1, 2, 3, 4, 5, 6]
    for event in events:
        assert event["steps_total"] == 6
        assert set(event["rewards"]) == {"tiny:digit_share", "correctness"}
        assert event["reward"] == pytest.approx(
            event["rewards"]["tiny:digit_share"] + 0.5 * event["rewards"]["correctness"]
        )
        assert 0 < event["completion_length"] <= 6
        assert 0 <= event["clipped"] <= 1
        assert event["tokens"] > 4 * 4
        assert event["generation_s"] > 0
        assert event["training_s"] > 0
        assert len(event["samples"]) == 3
        assert set(event["samples"][0]) == {"prompt", "completion", "rewards"}
        numbers = ("loss", "reward_std", "kl", "entropy", "clip_ratio", "grad_norm")
        assert all(math.isfinite(event[name]) for name in numbers)
        orjson.dumps(event)  # plain JSON values
    assert [event["learning_rate"] for event in events] == pytest.approx(
        [1e-2 * left / 6 for left in (6, 5, 4, 3, 2, 1)]
    )
    assert [event["step"] for event in job.of_type("checkpoint")] == [3, 6]
    assert result["metrics"]["reward"] == events[-1]["reward"]


@pytest.mark.slow
def test_steps_without_a_difference_of_rewards_in_any_group_are_warned_of_once(tmp_path):
    job = tiny.surroundings(tmp_path)
    run(spec(steps=25, reward=("custom",), custom_required_term=("no such term",)), job.ctx)
    (warning,) = job.of_type("warning")
    assert warning["step"] == 20
    assert warning["message"].startswith("nothing is being learned: for 20 steps, all completions")


def test_the_model_and_its_tokenizer_load_from_the_run_directory(tmp_path):
    job = tiny.surroundings(tmp_path)
    result = run(spec(), job.ctx)
    assert same_weights(
        weights(tmp_path / result["model"]), weights(tmp_path / "checkpoints" / "checkpoint-6")
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer("1+2=")["input_ids"]) == "1+2="


def test_nothing_but_the_run_directory_is_written(tmp_path):
    job = tiny.surroundings(tmp_path)
    run(spec(), job.ctx)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["checkpoints", "gemm", "model", "pack_tokens"]


def test_beta_keeps_the_reference_and_measures_the_distance_to_it(tmp_path):
    # The warm model's path leads nowhere: the reference cannot have been read from disk.
    warm = tiny.model()
    untouched = {name: tensor.clone() for name, tensor in warm.state_dict().items()}
    job = tiny.surroundings(tmp_path, warm)
    run(spec(samples=12, beta=0.05), job.ctx)
    assert same_weights(dict(warm.state_dict()), untouched)
    kl = [event["kl"] for event in job.of_type("step")]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[-1] > 1e-4


def test_int8_rollouts_learn_like_others_and_say_how_far_off_they_were(tmp_path):
    options = {"samples": 12, "eval_samples": 20, "learning_rate": 3e-2}
    rewards = {}
    for dtype in ("float32", "int8"):
        job = tiny.surroundings(tmp_path / dtype)
        rewards[dtype] = run(spec(**options, rollout_dtype=dtype), job.ctx)
        drifts = [e["rollout_drift"] for e in job.of_type("step") if "rollout_drift" in e]
        assert len(drifts) == (12 if dtype == "int8" else 0)
        assert all(0 <= drift < 0.1 for drift in drifts)
    # An evaluation is by the weights as they are: before, it cannot tell the two apart.
    assert rewards["int8"]["reward_before"] == rewards["float32"]["reward_before"]
    assert rewards["int8"]["reward_after"] > rewards["int8"]["reward_before"]


def test_int8_rollouts_are_refused_for_a_model_that_takes_no_packs(tmp_path):
    job = tiny.surroundings(tmp_path, tiny.model(dropout=0.1))
    with pytest.raises(JobFailed, match="rollout_dtype: must be float32"):
        run(spec(rollout_dtype="int8"), job.ctx)


def test_an_evaluation_takes_nothing_from_the_randomness_of_training(tmp_path):
    run(spec(), tiny.surroundings(tmp_path / "without").ctx)
    run(spec(eval_samples=20), tiny.surroundings(tmp_path / "with").ctx)
    assert same_weights(weights(tmp_path / "with" / "model"), weights(tmp_path / "without/model"))


def test_empty_completions_are_trained_on_like_others(tmp_path):
    warm = tiny.model()
    end = warm.config.eos_token_id
    warm.generation_config.suppress_tokens = [
        token for token in range(warm.config.vocab_size) if token != end
    ]
    job = tiny.surroundings(tmp_path, warm)
    run(spec(eval_samples=2), job.ctx)
    for event in job.of_type("step"):
        assert (event["completion_length"], event["clipped"]) == (1, 0)
        assert event["samples"][0]["completion"] == ""


# Prompts.


def test_a_prompt_that_is_too_long_fails_by_its_row(tmp_path):
    data = rows(tmp_path / "data.jsonl", {"prompt": "short"}, {"prompt": "long" * 20})
    with pytest.raises(JobFailed, match=r"^max_prompt_length: the prompt of row 2 has 80 tokens"):
        run(spec(samples=2, dataset=data), tiny.surroundings(tmp_path / "run").ctx)


def test_a_prompt_is_cut_from_the_left_when_asked_and_it_is_said(tmp_path):
    data = rows(tmp_path / "data.jsonl", {"prompt": "short"}, {"prompt": "long" * 20})
    job = tiny.surroundings(tmp_path / "run")
    run(spec(samples=2, dataset=data, max_prompt_length=10), job.ctx)
    assert [event["prompts"] for event in job.of_type("truncated")] == [1]
    tokens = {event["samples"][0]["prompt"]: event["tokens"] for event in job.of_type("step")}
    assert tokens["long" * 20] <= 4 * (10 + 6)


def test_without_a_length_completions_take_what_the_longest_prompt_leaves(tmp_path):
    data = rows(tmp_path / "data.jsonl", {"prompt": "x" * 60}, {"prompt": "short"})
    job = tiny.surroundings(tmp_path / "run")
    run(spec(samples=2, dataset=data, max_completion_length=None), job.ctx)
    assert job.of_type("begin")[0]["max_completion_length"] == 4


def test_chat_messages_go_through_the_tokenizers_template(tmp_path):
    chat = [{"role": "user", "content": "1+1"}]
    data = rows(tmp_path / "data.jsonl", {"prompt": chat}, {"prompt": "2+2"})
    job = tiny.surroundings(tmp_path / "run")
    job.ctx.models.tokenizer.chat_template = (  # type: ignore[attr-defined]
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    )
    run(spec(samples=2, dataset=data, chat_template=True, system="brief"), job.ctx)
    assert {event["samples"][0]["prompt"] for event in job.of_type("step")} == {
        "system: brief\nuser: 1+1\nassistant:",
        "system: brief\nuser: 2+2\nassistant:",
    }


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
            r"takes longer than 0\.3 s",
        ),
        ("{{ raise_exception('roles must alternate') }}", "says: roles must alternate"),
    ],
    ids=["endless", "refuses"],
)
def test_a_chat_template_that_goes_wrong_fails_the_job_by_its_row(
    tmp_path, monkeypatch, template, words
):
    monkeypatch.setattr(chat_templates, "LIMIT_S", 0.3)
    job = tiny.surroundings(tmp_path / "run")
    job.ctx.models.tokenizer.chat_template = template  # type: ignore[attr-defined]
    data = rows(tmp_path / "data.jsonl", {"prompt": [{"role": "user", "content": "1+1"}]})
    with pytest.raises(
        JobFailed, match=rf"^dataset: the prompt of row 1: the chat template {words}$"
    ):
        run(spec(samples=1, dataset=data), job.ctx)


def test_chat_messages_without_a_template_fail_in_one_line(tmp_path):
    data = rows(tmp_path / "data.jsonl", {"prompt": [{"role": "user", "content": "1+1"}]})
    with pytest.raises(JobFailed, match=r"^chat_template: the tokenizer of this model has none$"):
        run(spec(samples=1, dataset=data), tiny.surroundings(tmp_path / "run").ctx)


# NaN.


def test_a_model_with_nan_weights_fails_before_the_first_step(tmp_path):
    warm = tiny.model()
    warm.model.norm.weight[0] = math.nan
    job = tiny.surroundings(tmp_path, warm)
    with pytest.raises(JobFailed, match=r"^step 0: the norm of the weights is nan$"):
        run(spec(), job.ctx)
    assert not job.of_type("step")


def test_a_weight_that_is_not_finite_fails_the_first_step_even_if_nothing_depends_on_it(tmp_path):
    warm = tiny.model()
    warm.model.register_parameter("spare", torch.nn.Parameter(torch.tensor(math.nan)))
    job = tiny.surroundings(tmp_path, warm)
    with pytest.raises(JobFailed, match=r"^step 1: the norm of the weights is nan$"):
        run(spec(save_every=1), job.ctx)
    assert not job.of_type("step")
    assert job.ctx.checkpoints.latest() is None


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(tmp_path, number):
    warm = tiny.model()
    calls = 0

    def spoil(module: Any, gradients: Any, outputs: Any) -> Any:
        nonlocal calls
        calls += 1
        return tuple(g * number if calls == 3 else g for g in gradients)

    warm.model.layers[1].register_full_backward_hook(spoil)
    job = tiny.surroundings(tmp_path, warm)
    with pytest.raises(JobFailed, match=r"^step 3: the norm of the gradient is nan$"):
        run(spec(save_every=1), job.ctx)
    latest = job.ctx.checkpoints.latest()
    assert latest is not None
    assert latest.name == "checkpoint-2"
    assert all(torch.isfinite(tensor).all() for tensor in weights(latest).values())
    assert all(torch.isfinite(weight).all() for weight in warm.parameters())
    assert not (tmp_path / "model").exists()


def test_weights_that_explode_fail_the_job_and_leave_the_last_good_checkpoint(tmp_path):
    job = tiny.surroundings(tmp_path)
    with pytest.raises(JobFailed, match=r"^step \d: "):
        # More than may be asked for: with less, what explodes is not the weights.
        run(replace(spec(lr_scheduler="constant", save_every=1), learning_rate=1e38), job.ctx)
    latest = job.ctx.checkpoints.latest()
    if latest is not None:
        assert all(torch.isfinite(tensor).all() for tensor in weights(latest).values())


# Stop and resume.

HARD_CASES = {
    "second epoch": {"samples": 4, "epochs": 3},
    "workload": {"num_generations": 2, "batch_size": 1, "gradient_accumulation": 2, "beta": 0.1},
    "reused completions": {"samples": 4, "num_iterations": 2, "epochs": 2},
    "int8 completions": {
        "rollout_dtype": "int8",
        "samples": 4,
        "num_iterations": 2,
        "epochs": 2,
        "beta": 0.05,
    },
    "accumulated": {"prompts_per_step": 2, "samples": 5, "epochs": 4, "batch_size": 2},
    "dynamic sampling": {"resample": 3, "samples": 9, "reward": ["tiny:begins_with_digit"]},
    "replay": {
        "replay": 2,
        "samples": 3,
        "epochs": 4,
        "num_iterations": 2,
        "learning_rate": 1e-3,
        "reward": ["tiny:begins_with_digit"],
    },
    "moving reference": {"beta": 0.5, "ref_model_sync_steps": 2, "samples": 10},
    "entropy target": {"entropy_target": 4.4, "entropy_coef": 0.05, "batch_size": 2, "samples": 10},
    "cosine with decay": {"lr_scheduler": "cosine", "warmup_steps": 4, "weight_decay": 0.1},
}


class PowerCut(BaseException):
    """Ends a run like a kill: nothing is saved any more."""


@pytest.mark.parametrize(
    "save_every", [5, pytest.param(3, marks=pytest.mark.slow)], ids=["saved at 5", "saved at 3"]
)
@pytest.mark.parametrize("options", HARD_CASES.values(), ids=HARD_CASES)
def test_a_run_that_died_resumes_bit_by_bit_where_its_checkpoint_was(tmp_path, options, save_every):
    job = spec(save_every=save_every, **options)
    takes_dropout = job.rollout_dtype == "float32" and not job.replay  # these two need packs
    dropout = 0.1 if takes_dropout else 0.0
    whole = tiny.surroundings(tmp_path / "whole", tiny.model(dropout=dropout))
    run(job, whole.ctx)

    first = tiny.surroundings(tmp_path / "died", tiny.model(dropout=dropout))
    first.raise_at_step[save_every + 1] = PowerCut()
    with pytest.raises(PowerCut):
        run(job, first.ctx)
    second = tiny.surroundings(tmp_path / "died", tiny.model(dropout=dropout))
    torch.rand(7)  # another process has used up randomness differently
    run(job, second.ctx)

    assert second.of_type("begin")[0]["resumed_from"] == save_every
    again, expected = steps(second.events), steps(whole.events)
    assert list(again) == list(range(save_every + 1, job.steps_total + 1))
    assert again == {step: expected[step] for step in again}
    assert same_weights(weights(tmp_path / "died" / "model"), weights(tmp_path / "whole" / "model"))


@pytest.mark.parametrize("gemm", ["onednn", "torch"])
def test_a_run_resumes_with_the_gemm_that_it_began_with(tmp_path, monkeypatch, gemm):
    used: list[bool] = []
    install = aten_overrides._install

    def noted(onednn: bool) -> Any:
        used.append(onednn)
        return install(onednn)

    monkeypatch.setattr(aten_overrides, "_install", noted)
    first = tiny.surroundings(tmp_path)
    first.stop_at_step = 3
    (tmp_path / "gemm").write_text(gemm)  # one of them would not be chosen now
    with pytest.raises(Stopped):
        run(spec(), first.ctx)
    second = tiny.surroundings(tmp_path)
    run(spec(), second.ctx)
    assert [job.of_type("begin")[0]["gemm"] for job in (first, second)] == [gemm, gemm]
    assert used == [gemm == "onednn"] * 2


def test_every_epoch_has_its_own_order_whatever_ran_before():
    from warmd.jobs.grpo.prompt_order import EpochSampler

    through = EpochSampler(range(20), mini_repeat_count=1, seed=7)
    orders = []
    for epoch in range(3):
        through.set_epoch(epoch)
        orders.append(list(through))
    assert orders[0] != orders[1] != orders[2]
    resumed = EpochSampler(range(20), mini_repeat_count=1, seed=7)
    resumed.set_epoch(2)
    assert list(resumed) == orders[2]


@pytest.mark.parametrize("options", [{}, {"resample": 2, "replay": 4}])
def test_kill_9_in_mid_run_loses_nothing_but_the_steps_since_the_checkpoint(tmp_path, options):
    job_spec = spec(reward=["tiny:begins_with_digit"], **options)
    run(job_spec, tiny.surroundings(tmp_path / "whole").ctx)
    child = os.fork()
    if child == 0:
        job = tiny.surroundings(tmp_path / "killed")
        job.kill_at_step = 5
        run(job_spec, job.ctx)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    second = tiny.surroundings(tmp_path / "killed")
    run(job_spec, second.ctx)
    assert list(steps(second.events)) == [4, 5, 6]
    assert same_weights(weights(tmp_path / "killed/model"), weights(tmp_path / "whole/model"))


def test_a_stop_saves_at_the_steps_end_and_the_resume_goes_on_from_there(tmp_path):
    whole = tiny.surroundings(tmp_path / "whole")
    result = run(spec(eval_samples=5, num_iterations=2), whole.ctx)

    folder = tmp_path / "stopped"
    first = tiny.surroundings(folder)
    first.stop_at_step = 7
    with pytest.raises(Stopped) as stopped:
        run(spec(eval_samples=5, num_iterations=2), first.ctx)
    assert stopped.value.step == 7
    assert first.ctx.checkpoints.latest() == folder / "checkpoints" / "checkpoint-7"
    assert not (folder / "model").exists()

    second = tiny.surroundings(folder)
    assert run(spec(eval_samples=5, num_iterations=2), second.ctx)["steps"] == 12
    assert [event["phase"] for event in second.of_type("eval")] == ["after"]
    assert steps(first.events) | steps(second.events) == steps(whole.events)
    assert same_weights(weights(folder / "model"), weights(tmp_path / "whole" / "model"))
    assert result["reward_before"] is not None


def test_evaluations_during_the_training_leave_it_as_it_is_and_are_resumed(tmp_path):
    straight = tiny.surroundings(tmp_path / "straight")
    run(spec(eval_samples=5, num_iterations=2), straight.ctx)
    options = {"eval_samples": 5, "num_iterations": 2, "eval_every": 5}
    whole = tiny.surroundings(tmp_path / "whole")
    result = run(spec(**options), whole.ctx)
    found = [(e["step"], e["phase"]) for e in whole.of_type("eval")]
    assert found == [(0, "before"), (5, "during"), (10, "during"), (12, "after")]
    first = tiny.surroundings(tmp_path / "parts")
    first.stop_at_step = 7
    with pytest.raises(Stopped):
        run(spec(**options), first.ctx)
    second = tiny.surroundings(tmp_path / "parts")
    assert run(spec(**options), second.ctx)["reward_after"] == result["reward_after"]
    assert [event["step"] for event in second.of_type("eval")] == [10, 12]
    for name in ("whole", "parts"):
        model = weights(tmp_path / name / "model")
        assert same_weights(model, weights(tmp_path / "straight" / "model"))


@pytest.mark.parametrize("option", [{"eval_every": 2}, {"keep_best": "eval_reward"}])
def test_evaluations_need_held_out_prompts(option):
    with pytest.raises(SpecError, match="must go with eval_samples or eval_dataset, got it alone"):
        spec(**option)


def test_a_resume_packs_as_before_however_much_memory_there_is_now(tmp_path, monkeypatch):
    def packs_of(number: int) -> None:
        monkeypatch.setattr("warmd.jobs.grpo.packed_trainer.tokens_that_fit", lambda *_: number)

    packs_of(20)
    run(spec(), tiny.surroundings(tmp_path / "whole").ctx)
    first = tiny.surroundings(tmp_path / "parts")
    first.stop_at_step = 4
    with pytest.raises(Stopped):
        run(spec(), first.ctx)
    packs_of(4000)
    run(spec(), tiny.surroundings(tmp_path / "parts").ctx)
    assert same_weights(weights(tmp_path / "parts/model"), weights(tmp_path / "whole/model"))


def test_a_stop_during_the_first_evaluation_is_heard(tmp_path):
    job = tiny.surroundings(tmp_path)
    job.stop.set()
    with pytest.raises(Stopped) as stopped:
        run(spec(eval_samples=5), job.ctx)
    assert stopped.value.step == 0
    assert not job.of_type("step")


def test_a_finished_run_does_not_train_again(tmp_path):
    result = run(spec(eval_samples=5), tiny.surroundings(tmp_path).ctx)
    finished = weights(tmp_path / "model")
    again = tiny.surroundings(tmp_path)
    assert run(spec(eval_samples=5), again.ctx) == result
    assert not again.of_type("step")
    assert same_weights(weights(tmp_path / "model"), finished)


def test_a_finished_run_can_be_given_more_steps_at_their_own_learning_rates(tmp_path):
    run(spec(), tiny.surroundings(tmp_path).ctx)
    more = tiny.surroundings(tmp_path)
    assert run(spec(steps=10), more.ctx)["steps"] == 10
    assert {step: event["learning_rate"] for step, event in steps(more.events).items()} == {
        step: pytest.approx(1e-2 * (11 - step) / 10) for step in (7, 8, 9, 10)
    }


def test_a_resume_on_other_data_is_refused(tmp_path):
    data = rows(tmp_path / "data.jsonl", *({"prompt": f"{n}+1="} for n in range(6)))
    run(spec(dataset=data, steps=3), tiny.surroundings(tmp_path / "run").ctx)
    rows(tmp_path / "data.jsonl", *({"prompt": f"{n}+2="} for n in range(6)))
    with pytest.raises(JobFailed, match=r"^dataset: its rows are not those"):
        run(spec(dataset=data), tiny.surroundings(tmp_path / "run").ctx)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path):
    first = tiny.surroundings(tmp_path)
    first.stop_at_step = 5
    with pytest.raises(Stopped):
        run(spec(), first.ctx)
    file = tmp_path / "checkpoints" / "checkpoint-5" / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:-10])
    second = tiny.surroundings(tmp_path)
    run(spec(), second.ctx)
    assert second.of_type("begin")[0]["resumed_from"] == 3
    assert "optimizer.pt" in second.of_type("warning")[0]["message"]
    assert Checkpoints(tmp_path / "checkpoints").latest() is not None


def test_a_grader_scores_completions_by_their_records_and_held_out_ones_too(tmp_path):
    grader = {
        **{"type": "text_similarity", "evaluation_metric": "fuzzy_match"},
        **{"input": "{{sample.output_text}}", "reference": "{{item.gold}}"},
    }
    data = rows(tmp_path / "rows.jsonl", *({"prompt": f"{n}=", "gold": "12"} for n in range(4)))
    held_out = rows(tmp_path / "eval.jsonl", {"prompt": "9=", "gold": "1"}, {"prompt": "8="})
    options = {"dataset": data, "eval_dataset": held_out, "samples": "all", "reward": ["grader"]}
    job = tiny.surroundings(tmp_path / "run")
    made = spec(**options, grader=orjson.dumps(grader).decode(), steps=2).located(tmp_path)
    assert (made.samples, len(made.held_out_problems())) == (4, 2)
    run(made, job.ctx)
    assert len(job.of_type("step")) == 2
    assert [event["n"] for event in job.of_type("eval")] == [2, 2]
    assert all(0 <= event["reward"] <= 1 for event in job.of_type("step"))


def test_bad_records_are_skipped_with_a_warning_or_refused(tmp_path):
    data = rows(tmp_path / "rows.jsonl", {"prompt": "1="}, {"text": "?"}, {"prompt": "2="})
    options = {"dataset": data, "samples": "all", "steps": 1}
    with pytest.raises(SpecError, match=r"line 2: must be an object with question, prompt"):
        spec(**options).located(tmp_path)
    job = tiny.surroundings(tmp_path / "run")
    run(spec(**options, skip_bad_rows=True).located(tmp_path), job.ctx)
    assert [event["rows_skipped"] for event in job.of_type("warning")] == [1]


def test_all_prompts_are_those_not_held_out():
    assert spec(samples="all").located(Path("/")).samples == 4050
    message = "grader: must go with the reward grader, got one without the other"
    with pytest.raises(SpecError, match=message):
        spec(reward=["grader"])
