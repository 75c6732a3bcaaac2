"""Search: trials are chosen by the scores of earlier ones, whatever is killed meanwhile."""

from __future__ import annotations

import importlib.util
import math

import pytest
from needs import needs
from worked_sweeps import advance, advance_killed, lines_of_advance, planned, queued

from warmd.daemon.groups.grid import SweepOptions
from warmd.daemon.groups.ranges import Range
from warmd.daemon.groups.sweep import SweepFolder
from warmd.jobs.errors import SpecError
from warmd.jobs.grpo.options import GrpoSpec

RATE = "learning_rate=1e-6..1e-2:log"
SEARCH = {"sweep": [RATE, "beta=0,0.1"], "search": "optuna"}
BEST = 1e-4


@pytest.fixture(autouse=True, scope="module")
def optuna() -> None:
    needs(importlib.util.find_spec("optuna") is not None, "optuna")


def reward_of(rate: float) -> float:
    """One at the best learning rate, less on both sides."""
    return 1 - abs(math.log10(rate / BEST)) / 4


def play(desk) -> None:
    """Run the next job to its end, with the reward of its learning rate."""
    run = desk.begin()
    reward = reward_of(desk.client.rundir(run.id).read_spec()["spec"]["learning_rate"])
    for number in range(1, 10):
        run.log.emit("step", step=number, steps_total=9, loss=0.5, reward=reward)
    run.finish({})


def points_of(desk, sweep_id: str) -> list[dict[str, float]]:
    return SweepFolder(desk.home, sweep_id).state().points


def test_a_mean_beyond_float64_is_none(desk):
    folder = SweepFolder(desk.home, planned(desk, **SEARCH))
    folder.update(scores={"0": math.inf, "1": 0.5})
    assert folder.state().scores == {"0": None, "1": 0.5}


def test_ranges_are_read_and_values_rounded_within_them():
    options = SweepOptions.parse({**SEARCH, "trials": "7"}, GrpoSpec)
    assert options.ranges == {"learning_rate": Range(1e-6, 1e-2, log=True, is_integer=False)}
    assert options.axes == {"beta": (0.0, 0.1)}
    assert options.ranges["learning_rate"].text == "1e-06..0.01:log"
    assert options.ranges["learning_rate"].rounded(0.000123456) == 0.0001235
    assert Range(0.33333, 1, log=False, is_integer=False).rounded(0.333331) == 0.33333
    as_file = {"sweep": {"learning_rate": "1e-6 .. 1e-2:log", "beta": [0, 0.1]}}
    assert SweepOptions.parse({**as_file, "search": "optuna", "trials": 7}, GrpoSpec) == options
    whole = SweepOptions.parse({**SEARCH, "sweep": ["num_generations=2..8"]}, GrpoSpec)
    assert whole.ranges == {"num_generations": Range(2, 8, log=False, is_integer=True)}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"sweep": [RATE]}, "sweep: must go with search for a range, got learning_rate=1e-06..0.0"),
        ({"search": "optuna"}, "search: must go with sweep"),
        ({**SEARCH, "search": "ray"}, "search: must be one of optuna, got 'ray'"),
        ({**SEARCH, "halving": 2}, "search: must not be given together with halving"),
        ({**SEARCH, "sweep": ["beta=0,1"], "array": 2}, "array: must not be given together with"),
        ({**SEARCH, "trials": 0}, "trials: must be an integer from 1 to 1000, got '0'"),
        ({**SEARCH, "trials": 600, "seeds": 2}, "sweep: must make at most 1000 jobs, got 1200"),
        ({"sweep": ["beta=0,1"], "trials": 3}, "trials: must go with search"),
        ({**SEARCH, "sweep": ["beta=1..0"]}, "beta: must rise in a range, got '1..0'"),
        ({**SEARCH, "sweep": ["beta=0..1:log"]}, "beta: must be above 0 in a range with :log"),
        ({**SEARCH, "sweep": ["beta=0..1:lin"]}, "beta: must be LOW..HIGH or LOW..HIGH:log"),
        ({**SEARCH, "sweep": ["beta=-1..1"]}, "beta: must be a number of at least 0"),
        ({**SEARCH, "sweep": ["beta=0...1"]}, "beta: must be"),
        ({**SEARCH, "sweep": ["seed=1..9"], "seeds": 2}, "seeds: must not be given together"),
    ],
)
def test_a_wrong_search_is_refused_with_the_field_and_the_problem(given, problem):
    with pytest.raises(SpecError) as raised:
        SweepOptions.parse(given, GrpoSpec)
    assert str(raised.value).startswith(problem)


def test_a_range_whose_values_change_the_number_of_steps_is_refused(desk):
    with pytest.raises(SpecError, match="search: must go with equal steps"):
        planned(desk, sweep=["epochs=1..3"], search="optuna")


@pytest.mark.slow
def test_trials_are_chosen_one_after_another_and_come_closer_to_the_best(desk):
    sweep_id = planned(desk, sweep=[RATE], search="optuna", trials=30, parallel=1)
    for number in range(1, 31):
        advance(desk, sweep_id)
        assert len(points_of(desk, sweep_id)) == number
        assert len(queued(desk)) == 1
        advance(desk, sweep_id)  # nothing has ended meanwhile
        assert len(queued(desk)) == 1
        play(desk)
    advance(desk, sweep_id)
    assert queued(desk) == []
    rates = [point["learning_rate"] for point in points_of(desk, sweep_id)]
    far = [abs(math.log10(rate / BEST)) for rate in rates]
    assert sum(far[20:]) < sum(far[:10]) / 2
    found = desk.client.groups.sweep(sweep_id)
    assert found["status"] == "finished"
    assert found["search"] == {
        "sampler": "optuna",
        "trials": 30,
        "ranges": {"learning_rate": "1e-06..0.01:log"},
    }
    best = found["points"][found["best"]]
    assert best["mean"] == pytest.approx(max(map(reward_of, rates)))
    shown = desk.warmd("show", sweep_id).out
    assert "optuna, 30 of 30 trials scored" in shown
    assert not SweepFolder(desk.home, sweep_id).is_active


def test_the_file_of_the_study_is_read_by_optuna(desk):
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    sweep_id = planned(desk, **SEARCH, trials=4, parallel=2, seeds=2)
    advance(desk, sweep_id)
    assert len(queued(desk)) == 4
    play(desk)
    play(desk)
    desk.begin().fail("the loss is nan")
    advance(desk, sweep_id)
    file = SweepFolder(desk.home, sweep_id).path / "optuna.log"
    storage = JournalStorage(JournalFileBackend(str(file)))
    study = optuna.load_study(study_name=sweep_id, storage=storage)
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "RUNNING", "RUNNING"]
    assert study.best_params == points_of(desk, sweep_id)[0]
    assert study.direction.name == "MAXIMIZE"


def test_a_trial_that_failed_counts_as_failed_until_its_jobs_have_succeeded(desk):
    sweep_id = planned(desk, sweep=[RATE], search="optuna", trials=2, parallel=1)
    advance(desk, sweep_id)
    desk.begin().fail("the loss is nan")
    advance(desk, sweep_id)
    play(desk)
    advance(desk, sweep_id)
    first, second = desk.client.groups.sweep(sweep_id)["points"]
    assert (first["mean"], second["n"]) == (None, 1)
    assert desk.warmd("resume", sweep_id).code == 0
    play(desk)
    advance(desk, sweep_id)
    assert SweepFolder(desk.home, sweep_id).state().scores.keys() == {"0", "1"}


def test_a_removed_job_is_not_queued_again_by_the_next_trial(desk):
    sweep_id = planned(desk, sweep=[RATE], search="optuna", trials=3, parallel=1)
    advance(desk, sweep_id)
    play(desk)
    advance(desk, sweep_id)
    first = desk.client.groups.sweep_members(sweep_id)[0]
    assert desk.warmd("rm", first).code == 0
    play(desk)
    advance(desk, sweep_id)
    assert queued(desk) == desk.client.groups.sweep_members(sweep_id)[2:]


def test_a_canceled_search_tries_nothing_more_until_it_is_resumed(desk):
    sweep_id = planned(desk, sweep=[RATE], search="optuna", trials=3, parallel=1)
    advance(desk, sweep_id)
    assert desk.warmd("cancel", sweep_id).code == 0
    advance(desk, sweep_id)
    assert queued(desk) == []
    assert not SweepFolder(desk.home, sweep_id).is_active
    assert desk.warmd("resume", sweep_id).code == 0
    advance(desk, sweep_id)
    assert queued(desk) == desk.client.groups.sweep_members(sweep_id)


MORE = pytest.mark.nightly(
    part="storms", catches="a line of the code of a search at which a kill repeats a trial"
)


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(5, id="some-lines", marks=pytest.mark.slow),
        pytest.param(40, id="more", marks=MORE),
    ],
)
def test_a_trial_killed_anywhere_is_chosen_again_and_queued_once(desk, points):
    def at_second() -> str:
        sweep_id = planned(desk, sweep=[RATE], search="optuna", trials=3, parallel=1)
        advance(desk, sweep_id)
        play(desk)
        return sweep_id

    def end(sweep_id: str) -> None:
        desk.warmd("cancel", sweep_id)
        assert desk.warmd("rm", sweep_id).code == 0

    lines = lines_of_advance(desk, whole := at_second())
    expected = points_of(desk, whole)
    assert len(expected) == 2
    end(whole)
    for line in sorted({1 + round(n * (lines - 1) / (points - 1)) for n in range(points)}):
        sweep_id = at_second()
        advance_killed(desk, sweep_id, line)
        advance(desk, sweep_id)
        assert points_of(desk, sweep_id) == expected, f"killed at line {line}"
        assert queued(desk) == desk.client.groups.sweep_members(sweep_id)[1:]
        end(sweep_id)
