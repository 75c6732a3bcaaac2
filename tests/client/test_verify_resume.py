"""`checkpoints verify --resume`: verifies exact resume on a user's job, and detects differences."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from daemons import Daemon
from desks import Desk
from safetensors.torch import save_file
from shell import warmd

from warmd.daemon.queue.nodes import READY, NodeRecord, NodeRegistry
from warmd.daemon.reports import verify_resume
from warmd.jobs.errors import CheckpointDamaged, Unavailable
from warmd.jobs.training.compare import compare_checkpoints, compare_events

COMPARED = [
    "weights",
    "optimizer",
    "random numbers",
    "job state",
    "other files",
    "events of the steps",
]

RECORD = NodeRecord(
    machine="here", version="0", schema=1, labels={}, queues={"train": 1}, pid=1, home="",
    state=READY, jobs=[], jobs_taken=0,
)  # fmt: skip


def jobs_of(daemon: Daemon | Desk) -> tuple[set[str], set[str]]:
    """The jobs on disk, and those in Redis."""
    known = {job["id"] for job in daemon.client.jobs.all()}
    return {path.name for path in daemon.home.runs.iterdir()}, known


@pytest.mark.slow
def test_verify_resume_verifies_a_job_and_removes_its_test_jobs(shared_daemon):
    job_id = shared_daemon.submit(samples=12, beta=0.1)
    shared_daemon.wait(job_id)
    before = jobs_of(shared_daemon)
    done = warmd(
        "checkpoints", "verify", "--resume", job_id, "--json", home=shared_daemon.home.path
    )
    assert done.code == 0, done.out + done.err
    [verdict] = done.objects
    assert verdict["exact"] is True
    assert verdict["differences"] == dict.fromkeys(COMPARED)
    assert (verdict["steps"], verdict["resumed_from"]) == (4, 2)
    assert "4 steps without interruption" in done.err
    assert "killed " in done.err
    assert jobs_of(shared_daemon) == before


@pytest.mark.slow
def test_a_job_that_is_not_deterministic_is_detected(shared_daemon):
    job_id = shared_daemon.submit("behaviours:fickle", learning_rate=1e-2)
    shared_daemon.wait(job_id)
    before = jobs_of(shared_daemon)
    done = warmd(
        "checkpoints", "verify", "--resume", job_id, "--steps", "2", home=shared_daemon.home.path
    )
    assert done.code == 1
    lines = done.out.splitlines()
    verdicts = {line[:21].strip(): line[21:].split()[0] for line in lines[1:7]}
    assert list(verdicts) == COMPARED
    assert verdicts["weights"] == verdicts["events of the steps"] == "different"
    assert verdicts["other files"] == "equal"
    assert "is not exact" in lines[7]
    assert jobs_of(shared_daemon) == before


def test_a_verification_without_a_worker_is_refused_with_advice(desk):
    job_id = desk.submit()
    desk.begin().finish({})
    before = jobs_of(desk)
    refusal = desk.warmd("checkpoints", "verify", "--resume", job_id)
    assert refusal.is_refusal(3)
    assert refusal.err == (
        "Error: no worker takes jobs of the queue train: start a daemon that has one, for example "
        "with `warmd start --workers train-0=train`; `warmd nodes` lists the daemons\n"
    )
    assert jobs_of(desk) == before


@pytest.mark.slow
def test_a_verification_ends_when_the_last_worker_leaves(desk, monkeypatch):
    monkeypatch.setattr(verify_resume, "_ABSENT_S", 1.0)
    job_id = desk.submit()
    desk.begin().finish({})
    nodes = NodeRegistry(desk.client.connection)
    nodes.beat("here", RECORD)
    said: list[str] = []

    def report(line: str) -> None:
        said.append(line)
        if "waits for a free worker" in line:
            nodes.remove("here")

    before = jobs_of(desk)
    with pytest.raises(Unavailable, match="no worker takes jobs of the queue train"):
        verify_resume.verify(desk.client, job_id, steps=4, report=report)
    assert said[-1].endswith("waits for a free worker")
    assert jobs_of(desk) == before


@pytest.mark.slow
def test_unverifiable_jobs_are_refused(shared_daemon):
    job_id = shared_daemon.submit(samples=1)
    shared_daemon.wait(job_id)
    refusal = warmd("checkpoints", "verify", "--resume", job_id, home=shared_daemon.home.path)
    assert refusal.is_refusal(2)
    assert refusal.err.startswith("Error: steps: must be at least 2 to be interrupted, got 1")


def test_a_failing_job_fails_the_verification_with_its_reason(shared_daemon):
    job_id = shared_daemon.submit("behaviours:raises", samples=4)
    shared_daemon.wait(job_id)
    broken = shared_daemon.folder / "broken"
    broken.touch()
    before = jobs_of(shared_daemon)
    done = warmd("checkpoints", "verify", "--resume", job_id, home=shared_daemon.home.path)
    broken.unlink()
    assert done.code == 1
    assert "the reward is broken" in done.err.splitlines()[-1]
    assert jobs_of(shared_daemon) == before


# The comparison itself.

STATE: dict[str, Any] = {
    "step": torch.tensor(3.0),
    "moments": [torch.arange(6.0).reshape(2, 3), torch.tensor([math.nan, 0.0])],
    "numpy": np.arange(4, dtype=np.uint32),
    "metrics": {"loss": math.nan, "reward": 0.5, "generation_s": 1.0},
    "name": "adam",
}


def flip_tensor(state: dict[str, Any]) -> None:
    state["moments"][0].view(torch.int32)[1, 2] ^= 1


def negative_zero(state: dict[str, Any]) -> None:
    state["moments"][1][1] = -0.0


def other_type(state: dict[str, Any]) -> None:
    state["step"] = 3.0


def other_dtype(state: dict[str, Any]) -> None:
    state["moments"][0] = state["moments"][0].double()


def other_scalar(state: dict[str, Any]) -> None:
    state["step"] = torch.tensor(4.0)


def other_metric(state: dict[str, Any]) -> None:
    state["metrics"]["loss"] = 0.0


def one_more(state: dict[str, Any]) -> None:
    state["more"] = None


def other_numpy(state: dict[str, Any]) -> None:
    state["numpy"][3] = 7


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (flip_tensor, "moments.0: 1 of 6 values"),
        (negative_zero, "moments.1: 1 of 2 values"),
        (other_type, "step: Tensor and float"),
        (other_dtype, "moments.0: (2, 3) torch.float32 and (2, 3) torch.float64"),
        (other_scalar, "step: 3.0 and 4.0"),
        (other_metric, "metrics.loss: nan and 0.0"),
        (one_more, "more: only in one"),
        (other_numpy, "numpy: 1 of 4 values"),
    ],
)
def test_the_smallest_difference_in_a_state_is_found(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], found: str
) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
        torch.save(STATE, folder / "optimizer.pt")
    state = torch.load(folders[1] / "optimizer.pt", weights_only=False)
    state["metrics"]["generation_s"] = 2.0  # the clock's
    torch.save(state, folders[1] / "optimizer.pt")
    assert compare_checkpoints(*folders) == {"optimizer.pt": None}
    change(state)
    torch.save(state, folders[1] / "optimizer.pt")
    assert compare_checkpoints(*folders) == {"optimizer.pt": found}


class Code:
    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return os.mkdir, (f"run-{self.number}",)


def test_state_is_compared_without_running_code_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
        torch.save({"numpy": np.random.get_state()}, folder / "rng_state.pth")
        np.random.random()
    found = compare_checkpoints(*folders)
    assert found["rng_state.pth"] is not None
    for number, folder in enumerate(folders):
        torch.save({"numpy": Code(number)}, folder / "rng_state.pth")
    with pytest.raises(CheckpointDamaged, match=r"rng_state\.pth: holds more than values"):
        compare_checkpoints(*folders)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other"]


def test_files_of_every_kind_are_compared(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for number, folder in enumerate((one, other)):
        folder.mkdir()
        save_file({"w": torch.tensor([1.0, float(number)])}, folder / "model.safetensors")
        (folder / "trainer_state.json").write_bytes(orjson.dumps({"global_step": number}))
        (folder / "merges.txt").write_text("same")
        (folder / "manifest.json").write_text(str(number))
    (other / "more.txt").touch()
    assert compare_checkpoints(one, other) == {
        "merges.txt": None,
        "model.safetensors": "w: 1 of 2 values",
        "more.txt": f"only in {other}",
        "trainer_state.json": "global_step: 0 and 1",
    }


def test_events_are_compared_but_for_the_clock():
    def events(loss: float, seconds: float) -> list[dict[str, Any]]:
        step = {"type": "step", "step": 1, "loss": loss, "generation_s": seconds, "seq": seconds}
        return [step, {"type": "checkpoint", "step": 1, "bytes": seconds}]

    assert compare_events(events(1.0, 1), events(1.0, 2)) == (1, None)
    assert compare_events(events(1.0, 1), events(1.5, 1)) == (1, "step 1.loss: 1.0 and 1.5")
    assert compare_events(events(1.0, 1), []) == (1, "step 1: only in one")
