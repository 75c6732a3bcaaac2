"""GRPO jobs that are stopped, killed or extended: the resume is exact."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import tiny
import torch
from breadth import mostly_slow
from grpo_jobs import rows, same_weights, spec, steps, weights

from warmd.daemon.runs.checkpoints import Checkpoints
from warmd.jobs.compute import aten_overrides
from warmd.jobs.errors import JobFailed, SpecError, Stopped
from warmd.jobs.grpo.kind import run

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


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
    """Ends a run like a power failure: nothing more is saved."""


AT_3 = pytest.mark.nightly(
    part="episodes", catches="an option that a checkpoint within a round or an epoch loses"
)
QUICK = ("workload",)


@pytest.mark.parametrize(
    "save_every", [5, pytest.param(3, marks=AT_3)], ids=["saved at 5", "saved at 3"]
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, options in HARD_CASES.items()
    ],
)
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
    assert list(again) == list(range(save_every + 1, max(expected) + 1))
    assert again == {step: expected[step] for step in again}
    assert same_weights(weights(tmp_path / "died" / "model"), weights(tmp_path / "whole" / "model"))


@pytest.mark.parametrize("gemm", mostly_slow(["onednn", "torch"], but=["onednn"]))
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
    from warmd.jobs.training.epochs import drawn_in_sequence

    order = drawn_in_sequence(20, seed=7)
    orders = [order(epoch) for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert drawn_in_sequence(20, seed=7)(2) == orders[2]
    assert order(1) == orders[1]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"resample": 2, "replay": 4}, marks=pytest.mark.slow)]
)
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


def test_a_stop_saves_at_the_steps_end_and_the_resume_continues_from_there(tmp_path):
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


@pytest.mark.slow
def test_evaluations_during_the_training_do_not_change_it_and_are_resumed(tmp_path):
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
    with pytest.raises(SpecError, match="must go with eval_samples above 0 or eval_dataset, got"):
        spec(**option)


@pytest.mark.slow
def test_a_resume_packs_as_before_however_much_memory_there_is_now(tmp_path, monkeypatch):
    def packs_of(number: int) -> None:
        monkeypatch.setattr("warmd.jobs.sequences.passes.tokens_that_fit", lambda *_, **__: number)

    packs_of(20)
    run(spec(), tiny.surroundings(tmp_path / "whole").ctx)
    first = tiny.surroundings(tmp_path / "parts")
    first.stop_at_step = 4
    with pytest.raises(Stopped):
        run(spec(), first.ctx)
    packs_of(4000)
    run(spec(), tiny.surroundings(tmp_path / "parts").ctx)
    assert same_weights(weights(tmp_path / "parts/model"), weights(tmp_path / "whole/model"))


def test_a_stop_during_the_first_evaluation_takes_effect(tmp_path):
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


@pytest.mark.slow
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


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path):
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
