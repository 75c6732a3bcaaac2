"""`report_to`: the run of a tracker belongs to the job, and ends with its training."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import sft_jobs
import tiny

from warmd.jobs.sft.kind import run
from warmd.jobs.training.trackers import tracked


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The ids of the runs that Weights & Biases has ended; a stand-in, which needs no account."""
    found: list[str | None] = []
    stand_in = SimpleNamespace(finish=lambda: found.append(os.environ.get("WANDB_RUN_ID")))
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.setenv("WANDB_RUN_ID", "")  # restored at the end, as WANDB_RESUME
    monkeypatch.setenv("WANDB_RESUME", "")
    return found


def test_a_run_has_the_id_of_its_job_and_ends_with_the_training(ends):
    with tracked("sft-1", ["wandb"]):
        assert (os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]) == ("sft-1", "allow")
        assert ends == []
    assert ends == ["sft-1"]


def test_a_run_ends_when_the_training_fails(ends):
    with pytest.raises(ValueError, match="x"), tracked("sft-1", ["wandb"]):
        raise ValueError("x")
    assert ends == ["sft-1"]


def test_nothing_is_sent_for_a_job_that_reports_elsewhere(ends):
    with tracked("sft-1", ["tensorboard"]):
        assert os.environ["WANDB_RUN_ID"] == ""
    assert ends == []


def test_a_run_that_cannot_be_ended_does_not_fail_the_training(ends, monkeypatch, caplog):
    def fail() -> None:
        raise OSError("no network")

    monkeypatch.setattr(sys.modules["wandb"], "finish", fail)
    with tracked("sft-1", ["wandb"]):
        pass
    assert "the run of wandb could not be ended" in caplog.text
    assert "no network" in caplog.text


def test_a_tracker_that_fails_is_a_warning_and_the_job_goes_on(tmp_path):
    job = replace(sft_jobs.spec(tmp_path), report_to=("trackio",))  # which is not installed
    made = tiny.surroundings(tmp_path / "run")
    assert run(job, made.ctx)["steps"] == 7
    (warning,) = made.of_type("warning")
    assert warning["message"].startswith("report_to: trackio: its run is not started: No module")
