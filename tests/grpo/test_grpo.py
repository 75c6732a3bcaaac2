"""The GRPO kind: training that learns, its events, and numbers that are not finite."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from typing import Any

import orjson
import pytest
import tiny
import torch
from grpo_jobs import rows, same_weights, spec, weights
from transformers import AutoTokenizer, Cache

from warmd.jobs.errors import JobFailed
from warmd.jobs.grpo.flat_rewards import FlatRewards
from warmd.jobs.grpo.kind import run

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


@pytest.mark.slow
def test_training_raises_the_reward_on_held_out_prompts(tmp_path):
    job = tiny.surroundings(tmp_path)
    result = run(spec(samples=40, num_generations=8, eval_samples=50), job.ctx)
    assert result["steps"] == 40
    assert result["reward_after"] > result["reward_before"] + 0.2
    before, after = job.of_type("eval")
    assert (before["phase"], before["step"], before["n"]) == ("before", 0, 50)
    assert (after["phase"], after["step"], after["reward"]) == ("after", 40, result["reward_after"])


@pytest.mark.parametrize(
    ("level", "loss", "warning"),
    [
        ("sequence", "grpo", None),
        ("token", "dapo", None),
        *(
            (
                "sequence",
                loss,
                f"importance_sampling_level: with sequence, loss_type {loss} weights a completion "
                "by its length; GSPO has loss_type grpo",
            )
            for loss in ("bnpo", "dr_grpo", "dapo", "cispo")
        ),
        ("sequence", "luspo", None),
        (
            "token",
            "luspo",
            "importance_sampling_level: LUSPO has sequence with loss_type luspo, got token",
        ),
    ],
)
def test_combinations_of_no_paper_give_trls_warning(tmp_path, level, loss, warning):
    job = tiny.surroundings(tmp_path)
    run(spec(importance_sampling_level=level, loss_type=loss, samples=1), job.ctx)
    messages = [event["message"] for event in job.of_type("warning")]
    assert messages == ([] if warning is None else [warning])


def test_each_step_is_one_event_with_everything_that_happened_in_it(tmp_path):
    job = tiny.surroundings(tmp_path)
    result = run(spec(reward=["tiny:digit_share", "correctness=0.5"], beta=0.1), job.ctx)
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
        assert len(event["samples"]) == 2
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
def test_steps_with_equal_rewards_in_every_group_give_one_warning(tmp_path):
    job = tiny.surroundings(tmp_path)
    run(spec(steps=25, reward=("custom",), custom_required_term=("no such term",)), job.ctx)
    (warning,) = job.of_type("warning")
    assert warning["step"] == 20
    assert warning["message"].startswith("nothing is being learned: for 20 steps, all completions")


def test_the_warning_that_nothing_is_learned_names_truncated_completions_first():
    def warning(truncated: float) -> str:
        flat = FlatRewards()
        told = [flat.count(is_flat=True, reward=0.0, truncated=truncated) for _ in range(30)]
        (message,) = filter(None, told)
        return message

    assert "is 0. 75% of the completions were truncated at max_completion_length" in warning(0.75)
    assert "is 0. The task may be too hard" in warning(0.25)


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
    assert written == ["checkpoints", "completions.jsonl", "gemm", "model", "pack_tokens"]


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


@pytest.mark.slow
def test_int8_rollouts_learn_like_others_and_report_their_drift(tmp_path):
    options = {"samples": 12, "eval_samples": 20, "learning_rate": 3e-2}
    rewards = {}
    for dtype in ("float32", "int8"):
        job = tiny.surroundings(tmp_path / dtype)
        rewards[dtype] = run(spec(**options, rollout_dtype=dtype), job.ctx)
        drifts = [e["rollout_drift"] for e in job.of_type("step") if "rollout_drift" in e]
        assert len(drifts) == (12 if dtype == "int8" else 0)
        assert all(0 <= drift < 0.1 for drift in drifts)
    # An evaluation uses the native weights, so both are equal before the training.
    assert rewards["int8"]["reward_before"] == rewards["float32"]["reward_before"]
    assert rewards["int8"]["reward_after"] > rewards["int8"]["reward_before"]


def test_int8_rollouts_are_refused_for_a_model_that_cannot_be_packed(tmp_path):
    job = tiny.surroundings(tmp_path, tiny.model(dropout=0.1))
    with pytest.raises(JobFailed, match="rollout_dtype: must be float32"):
        run(spec(rollout_dtype="int8"), job.ctx)


def test_an_evaluation_does_not_change_the_random_state_of_training(tmp_path):
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


def test_what_a_reward_sets_in_torch_does_not_change_the_training(tmp_path, monkeypatch):
    def sets(completions: list[str], **_: Any) -> list[float]:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(2)
        return tiny.digit_share([], completions, [])

    monkeypatch.setattr(tiny, "sets", sets, raising=False)
    try:
        found = []
        for reward in ("digit_share", "sets"):
            job = tiny.surroundings(tmp_path / reward)
            run(spec(reward=[f"tiny:{reward}"], steps=2, beta=0.1), job.ctx)
            found.append([(step["loss"], step["grad_norm"]) for step in job.of_type("step")])
    finally:
        torch.set_grad_enabled(True)
    assert found[0] == found[1]
    assert all(norm > 0 for _, norm in found[0])


def test_no_kv_cache_is_kept_while_completions_are_learned(tmp_path, monkeypatch):
    caches: list[int] = []

    def counts(completions: list[str], **_: Any) -> list[float]:
        gc.collect()
        caches.append(sum(isinstance(one, Cache) for one in gc.get_objects()))
        return tiny.digit_share([], completions, [])

    monkeypatch.setattr(tiny, "counts", counts, raising=False)
    padded = tiny.model(dropout=0.1)
    run(spec(reward=["tiny:counts"], steps=2), tiny.surroundings(tmp_path, padded).ctx)
    assert caches == [0, 0]


def test_weights_that_explode_fail_the_job_and_leave_the_last_good_checkpoint(tmp_path):
    job = tiny.surroundings(tmp_path)
    with pytest.raises(JobFailed, match=r"^step \d: "):
        # Above the allowed maximum: with a smaller rate, the weights do not explode first.
        run(replace(spec(lr_scheduler="constant", save_every=1), learning_rate=1e38), job.ctx)
    latest = job.ctx.checkpoints.latest()
    if latest is not None:
        assert all(torch.isfinite(tensor).all() for tensor in weights(latest).values())


def test_a_grader_scores_completions_by_their_records_also_held_out_ones(tmp_path):
    grader = {
        **{"type": "text_similarity", "evaluation_metric": "fuzzy_match"},
        **{"input": "{{sample.output_text}}", "reference": "{{item.gold}}"},
    }
    data = rows(tmp_path / "rows.jsonl", *({"prompt": f"{n}=", "gold": "12"} for n in range(4)))
    held_out = rows(tmp_path / "eval.jsonl", {"prompt": "9=", "gold": "1"}, {"prompt": "8="})
    options = {"dataset": data, "eval_dataset": held_out, "samples": "all", "reward": ["grader"]}
    job = tiny.surroundings(tmp_path / "run")
    made = spec(**options, grader=orjson.dumps(grader).decode(), steps=2).located(tmp_path)
    assert (made.samples, len(made.parts.held_out)) == (4, 2)
    run(made, job.ctx)
    assert len(job.of_type("step")) == 2
    for event in job.of_type("eval"):
        low, high = event["intervals"]["reward"]
        assert event["n"] == 2
        assert low <= event["reward"] <= high
    assert not any("intervals" in event for event in job.of_type("step"))
    assert all(0 <= event["reward"] <= 1 for event in job.of_type("step"))
