"""Sweeps and curricula where a model is named."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from desks import Desk

from warmd.daemon.client.checking import resolve_model
from warmd.daemon.groups.curriculum import CONTINUE, CurriculumFolder
from warmd.jobs.errors import NotFound, SpecError

AXIS = ("--sweep", "learning_rate=1e-6,1e-5", "--name", "rates")


def play(desk: Desk, reward: float) -> str:
    """Run the next job to its end, with a model; return its id."""
    run = desk.begin()
    for step in range(1, 5):
        run.log.emit("step", step=step, steps_total=4, loss=0.5, reward=reward)
    shutil.copytree(desk.model, run.rundir.path / "model")
    run.finish({"steps": 4})
    return run.id


def test_a_sweep_as_a_model_is_its_best_job_once_it_has_ended(desk):
    done = desk.warmd(*desk.grpo, *AXIS)
    sweep_id = done.out.strip()
    config = desk.client.config
    with pytest.raises(NotFound, match=f"^model: {sweep_id} has no job with a score"):
        resolve_model("rates", config)
    best = play(desk, 0.5)
    with pytest.raises(SpecError, match=rf"^model: must be of an ended sweep, .* so far, {best}$"):
        resolve_model("rates", config)
    play(desk, 0.1)
    (desk.home.sweeps / sweep_id / "active").unlink(missing_ok=True)
    assert resolve_model("rates", config).name == best
    assert resolve_model(sweep_id, config).name == best
    assert desk.client.models.weights("rates").name == best
    # A job stores which one it was: the best one of a sweep that is resumed may change.
    job_id = desk.warmd("submit", "grpo", "--model", "rates", "--samples", "4").out.strip()
    document = desk.client.rundir(job_id).read_spec()
    assert (document["spec"]["model"], document["model"]["name"]) == (best, best)


def test_a_name_of_a_sweep_and_of_a_trained_job_is_refused_with_their_ids(desk):
    sweep_id = desk.warmd(*desk.grpo, *AXIS).out.strip()
    for _ in range(2):
        play(desk, 0.5)
    job_id = desk.submit("--name", "rates")
    play(desk, 0.5)
    listed = f"{sweep_id}, {job_id}"
    with pytest.raises(SpecError, match=f"^model: 'rates' is the name of 2 .*: {listed}$"):
        resolve_model("rates", desk.client.config)
    done = desk.warmd("show", "rates")
    assert done.err == f"Error: sweep: 'rates' may be any of 2: {listed}\n"


def test_a_curriculum_as_a_model_is_the_latest_that_passed(desk):
    values = {"model": desk.grpo[3], "num_generations": 2}
    given = {"stages": [{"samples": 4}, {"samples": 8}]}
    curriculum_id = desk.client.groups.submit_curriculum("grpo", values, given)
    with pytest.raises(NotFound, match=f"no stage of {curriculum_id} has passed its gate yet"):
        resolve_model(curriculum_id, desk.client.config)
    job_id = play(desk, 0.5)
    folder = CurriculumFolder(desk.home, curriculum_id)
    with folder.changing():
        folder.update(attempts=[replace(folder.state().attempts[0], decision=CONTINUE)])
    assert resolve_model(curriculum_id, desk.client.config).name == job_id
