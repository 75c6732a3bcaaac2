"""The steps of epochs are planned on the rows that are kept, as TRL plans them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import dpo_jobs
import pytest
import sft_jobs
import tiny
from breadth import mostly_slow
from daemons import Daemon

from warmd.daemon.lifecycle.queueing import Queueing
from warmd.daemon.runs.rundir import RunDir
from warmd.jobs.context import RULES
from warmd.jobs.dpo.kind import run as run_dpo
from warmd.jobs.errors import JobFailed, Stopped
from warmd.jobs.sft.kind import run as run_sft

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

KINDS: dict[str, tuple[Any, Any]] = {"sft": (sft_jobs, run_sft), "dpo": (dpo_jobs, run_dpo)}
# Of 14 records, 7 have a prompt that fills 10 tokens.
SHORT = {"max_length": 10, "batch_size": 4}


def job(folder: Path, *, rules: int = RULES) -> tiny.Surroundings:
    """A job that was submitted to the version with these rules."""
    made = tiny.surroundings(folder)
    made.ctx = replace(made.ctx, rules=rules)
    return made


def rates(made: tiny.Surroundings) -> list[float]:
    return [event["learning_rate"] for event in made.of_type("step")]


def rates_of_trl(kind: str, folder: Path, **options: Any) -> list[float]:
    """The learning rates of TRL's own training on the same records."""
    how: dict[str, Any] = {"num_train_epochs": 2, "max_steps": -1, "learning_rate": 1e-2, **options}
    model = sft_jobs.small("llama")
    if kind == "sft":
        length = {"max_length": 10}
        made = sft_jobs.trainer("trl", folder, model, "long prompts", how=length, **how)
    else:
        made = dpo_jobs.trainer("trl", folder, model, "long prompts", max_length=10, **how)
    return [step["learning_rate"] for step in sft_jobs.train(made)[0]]


@pytest.mark.parametrize("kind", mostly_slow(KINDS, but=("dpo",)))
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_epoch_has_the_steps_and_learning_rates_of_trl(tmp_path, kind, accumulation):
    jobs, run = KINDS[kind]
    made = job(tmp_path)
    options = {**SHORT, "epochs": 2, "gradient_accumulation": accumulation}
    result = run(jobs.spec(tmp_path, "long prompts", **options), made.ctx)
    theirs = rates_of_trl(kind, tmp_path / "trl", gradient_accumulation_steps=accumulation)
    assert rates(made) == pytest.approx(theirs)
    assert result["steps"] == len(theirs) == (4 if accumulation == 1 else 2)
    assert {event["steps_total"] for event in made.of_type("step")} == {len(theirs)}
    first, second = (warning["message"] for warning in made.of_type("warning"))
    assert first.startswith("max_length: 7 of 14 records are longer than 10 tokens")
    assert second == (
        "max_length: leaves no token to learn in 7 of 14 records, which are left out: "
        f"{len(theirs)} steps instead of {8 // accumulation}"
    )


@pytest.mark.parametrize("kind", mostly_slow(KINDS, but=("sft",)))
def test_steps_that_are_requested_are_done(tmp_path, kind):
    jobs, run = KINDS[kind]
    made = job(tmp_path)
    assert run(jobs.spec(tmp_path, "long prompts", **SHORT, steps=5), made.ctx)["steps"] == 5
    (warning,) = made.of_type("warning")
    assert "and are truncated; 7 have no token left to learn" in warning["message"]


@pytest.mark.parametrize("kind", mostly_slow(KINDS, but=("sft",)))
def test_a_job_of_an_earlier_version_keeps_its_steps_and_learning_rates(tmp_path, kind):
    jobs, run = KINDS[kind]
    options = {**SHORT, "epochs": 2, "save_every": 3}
    straight = job(tmp_path / "straight", rules=0)
    run(jobs.spec(tmp_path, "long prompts", **options), straight.ctx)
    assert len(rates(straight)) == 8
    broken = job(tmp_path / "broken", rules=0)
    broken.stop_at_step = 5
    with pytest.raises(Stopped):
        run(jobs.spec(tmp_path, "long prompts", **options), broken.ctx)
    again = job(tmp_path / "broken", rules=0)
    run(jobs.spec(tmp_path, "long prompts", **options), again.ctx)
    assert [*rates(broken), *rates(again)] == rates(straight)
    assert not again.of_type("extended")


def test_no_record_with_a_token_to_learn_fails_the_job(tmp_path):
    rows = sft_jobs.ROWS["long prompts"][1::2]
    path = sft_jobs.write(tmp_path / "long.jsonl", rows)
    with pytest.raises(JobFailed, match=r"^max_length: must leave a token to learn"):
        run_sft(sft_jobs.spec(tmp_path, dataset=path, max_length=10), job(tmp_path).ctx)


@pytest.mark.slow
def test_the_number_of_steps_is_shown_and_kept_by_the_jobs_of_earlier_versions(
    shared_daemon: Daemon, tmp_path: Path
):
    client = shared_daemon.client
    spec = sft_jobs.spec(tmp_path, "long prompts", **SHORT, model="tiny")
    new = client.jobs.submit(spec)
    old = client.jobs.submit(spec, Queueing(delay_s=3))
    rundir = RunDir(shared_daemon.home.runs / old)
    assert rundir.read_spec()["rules"] == RULES
    rundir.annotate(rules=0)
    for job_id, steps in ((new, 2), (old, 4)):
        done = shared_daemon.wait(job_id)
        assert (done["status"], done["step"], done["steps_total"]) == ("finished", steps, steps)
    assert client.jobs.resume(new) == "finished"
    assert client.jobs.resume(new, changes={"steps": 2}) == "finished"
    assert client.jobs.resume(new, changes={"steps": 3}) == "queued"
    assert shared_daemon.wait(new)["step"] == 3
