"""`report_to`: the run of a tracker belongs to the job, and ends with its training."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sft_jobs
import tiny

from warmd.jobs.sft.kind import run


class Run:
    """A run of Weights & Biases: a stand-in, which needs no account."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.logged: list[dict[str, float]] = []
        self.has_ended = False

    def define_metric(self, name: str, **how: Any) -> None:
        """Metrics have no order here."""

    def log(self, metrics: dict[str, float]) -> None:
        self.logged.append(metrics)

    def finish(self) -> None:
        self.has_ended = True


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    found: list[Run] = []

    def init(**options: Any) -> Run:
        found.append(Run(**options))
        return found[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return found


@pytest.mark.slow
def test_a_run_has_the_id_of_its_job_and_ends_with_the_training(tmp_path, runs):
    job = replace(sft_jobs.spec(tmp_path), report_to=("wandb",))
    made = tiny.surroundings(tmp_path / "run")
    run(job, made.ctx)
    (found,) = runs
    assert (found.options["id"], found.options["resume"]) == (made.ctx.job_id, "allow")
    assert [metrics["train/global_step"] for metrics in found.logged] == list(range(1, 8))
    assert found.has_ended


def test_a_run_ends_when_the_training_fails(tmp_path, runs):
    job = replace(sft_jobs.spec(tmp_path), report_to=("wandb",))
    made = tiny.surroundings(tmp_path / "run")
    made.raise_at_step[2] = ValueError("x")
    with pytest.raises(ValueError, match="x"):
        run(job, made.ctx)
    assert runs[0].has_ended


def test_a_tracker_that_fails_is_a_warning_and_the_job_goes_on(tmp_path):
    job = replace(sft_jobs.spec(tmp_path), report_to=("trackio",))  # which is not installed
    made = tiny.surroundings(tmp_path / "run")
    assert run(job, made.ctx)["steps"] == 7
    (warning,) = made.of_type("warning")
    assert warning["message"].startswith("report_to: trackio: its run is not started: No module")
