"""The plan of a sweep: its combinations, seeds, metric and rungs."""

from __future__ import annotations

import pytest

from warmd.daemon.groups.grid import (
    SweepOptions,
    is_lower_better,
    metric_for,
    rungs_for,
    variant,
)
from warmd.jobs.errors import SpecError
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.sft.options import SftSpec
from warmd.jobs.training.options import TrainingSpec

GRPO: type[TrainingSpec] = GrpoSpec


def test_all_combinations_of_the_values_are_points():
    given = {"sweep": ["learning_rate=1e-6,1e-5", "beta=0,0.1"], "seeds": "2"}
    options = SweepOptions.parse(given, GRPO)
    assert options.points == [
        {"learning_rate": 1e-6, "beta": 0.0},
        {"learning_rate": 1e-6, "beta": 0.1},
        {"learning_rate": 1e-5, "beta": 0.0},
        {"learning_rate": 1e-5, "beta": 0.1},
    ]
    assert options.seeds == 2
    as_file = {"sweep": {"learning-rate": ["1e-6", 1e-5], "beta": [0, 0.1]}, "seeds": 2}
    assert SweepOptions.parse(as_file, GRPO) == options


def test_jobs_of_a_point_differ_in_the_seed_and_those_of_an_array_also_in_the_index():
    options = {"seed": 7, "dataset": "part-{index}.jsonl", "reward": ["math", "a:{index}"]}
    assert variant(options, {"beta": 0.1}, 2) == {**options, "beta": 0.1, "seed": 9}
    assert variant(options, {"index": 3}, 0) == {
        "seed": 10,
        "dataset": "part-3.jsonl",
        "reward": ["math", "a:3"],
    }


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"sweep": ["learning_rat=1"]}, "sweep: must be of options of the kind"),
        ({"sweep": ["learning_rate"]}, "sweep: must be OPTION=VALUE,VALUE"),
        ({"sweep": ["learning_rate=1e-5,1e-5"]}, "sweep: must have 1 to 100 different values"),
        ({"sweep": ["learning_rate=1e-5,7"]}, "learning_rate: must be a number above 0"),
        ({"sweep": ["reward=math"]}, "sweep: must be of options with one value each"),
        ({"sweep": ["beta=0", "beta=1"]}, "sweep: must have beta once"),
        ({"sweep": ["seed=1,2"], "seeds": 2}, "seeds: must not be given together"),
        ({"seeds": "0"}, "seeds: must be an integer from 1 to 1000, got '0'"),
        ({"seeds": True}, "seeds: must be an integer"),
        ({"array": 3, "seeds": 2}, "array: must not be given together with seeds"),
        ({"array": 3, "sweep": ["beta=0"]}, "array: must not be given together with sweep"),
        ({"halving": 3}, "halving: must go with sweep"),
        ({"halving": 1, "sweep": ["beta=0"]}, "halving: must be an integer from 2 to 16"),
        ({"sweep": ["beta=0,1"], "seeds": 501}, "sweep: must make at most 1000 jobs, got 1002"),
        ({"metric": "accuracy"}, "metric: must be one of loss, reward, kl, eval_reward, got"),
    ],
)
def test_a_wrong_plan_is_refused_with_the_field_and_the_problem(given, problem):
    with pytest.raises(SpecError) as raised:
        SweepOptions.parse(given, GRPO)
    assert str(raised.value).startswith(problem)


def test_the_metric_is_that_of_held_out_data_if_there_is_any():
    spec = GRPO.parse({"model": "m", "samples": 8})
    assert metric_for(spec, None) == "reward"
    assert metric_for(GRPO.parse({"model": "m", "eval_samples": 8}), None) == "eval_reward"
    with pytest.raises(SpecError, match="metric: must go with held-out data"):
        metric_for(spec, "eval_reward")
    assert is_lower_better(GRPO, "kl")
    assert is_lower_better(SftSpec, "eval_loss")
    assert not is_lower_better(GRPO, "eval_reward")


def test_rungs_leave_enough_points_for_every_halving():
    assert rungs_for(80, 9, None) == [80]
    assert rungs_for(81, 9, 3) == [9, 27, 81]
    assert rungs_for(80, 3, 3) == [26, 80]
    assert rungs_for(10, 5, 2) == [2, 5, 10]
    with pytest.raises(SpecError, match="halving: must be at most the number of points"):
        rungs_for(80, 2, 3)
    with pytest.raises(SpecError, match="steps: must be at least 9"):
        rungs_for(8, 9, 3)
