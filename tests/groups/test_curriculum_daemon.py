"""Curricula in a real daemon: kill -9 at gates and in stages changes nothing."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlm_jobs
import orjson
import pytest
from daemons import Daemon
from waiting import wait_until

from warmd.configs.config import WorkerConfig
from warmd.jobs.errors import WarmdError

DEMO = Path(__file__).parents[2] / "configs" / "demo"
WORKERS = (
    WorkerConfig(name="train-0", queue="train", threads=1),
    WorkerConfig(name="infer-0", queue="infer", isolation="resident", slots=4, threads=1),
)
# Of each kind: a learning rate that does no harm; the records of both stages; one that ruins it.
STAGES = {
    "grpo": (3e-4, (6, 20), 0.05),
    "sft": (3e-4, (24, 160), 0.9),
    "dpo": (1e-5, (24, 160), 0.9),
}


@pytest.fixture(scope="module")
def daemon(daemons: Callable[..., Daemon]) -> Iterator[Daemon]:
    """A daemon that the tests kill parts of."""
    started = daemons(workers=WORKERS)
    started.start()
    yield started
    started.close()


def sums(kind: str, path: Path) -> dict[str, Any]:
    """Options of a kind: the data is sums, of two numbers below 50."""
    if kind == "grpo":
        return {}
    rows: list[dict[str, Any]] = []
    for n in range(240):
        one, other = n % 49 + 1, n * 7 % 50
        right, wrong = str(one + other), str(one + other + 1)
        answers = {"completion": right} if kind == "sft" else {"chosen": right, "rejected": wrong}
        rows.append({"prompt": f"{one}+{other}=", **answers})
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return {"dataset": str(path)}


def submit(daemon: Daemon, kind: str) -> str:
    """Stages on the demo model; the learning rate of the second one ruins it three times."""
    good, samples, rate = STAGES[kind]
    given = {
        "stages": [
            {"name": "good", "samples": samples[0], "learning_rate": good},
            {"name": "broken", "samples": samples[1], "learning_rate": rate},
        ],
        "gate": {"samples": 60, "most_samples": 120, "max_tokens": 4},
    }
    values = {"model": str(DEMO), "save_every": "2"} | sums(kind, daemon.folder / f"{kind}.jsonl")
    return str(daemon.client.groups.submit_curriculum(kind, values, given))


def ended(daemon: Daemon, curriculum_id: str) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        with contextlib.suppress(WarmdError):  # Redis may be unreachable for a moment
            one = daemon.client.groups.curriculum(curriculum_id)
            return one if one["status"] in ("finished", "failed") else None
        return None

    one: dict[str, Any] = wait_until(found, timeout_s=180)
    return one


def outcome(daemon: Daemon, found: dict[str, Any]) -> list[Any]:
    """Decisions with their numbers, and the weights of each attempt."""
    weights = "model/model.safetensors"
    return [
        (
            attempt["stage"],
            attempt["decision"],
            attempt["comparison"],
            (daemon.client.rundir(attempt["job"]).path / weights).read_bytes(),
        )
        for attempt in found["attempts"]
    ]


@pytest.mark.nightly(
    part="storms", catches="a gate or a stage that a daemon computes twice after a kill"
)
@pytest.mark.parametrize("kind", list(STAGES))
def test_a_curriculum_killed_at_its_gates_and_in_its_stages_equals_an_uninterrupted_one(
    daemon, kind
):
    straight = ended(daemon, submit(daemon, kind))
    decisions = [attempt["decision"] for attempt in straight["attempts"]]
    assert decisions == ["continue", "roll back", "roll back", "give up"]
    curriculum_id = submit(daemon, kind)
    known: set[str] = set()

    def newest() -> str | None:
        """A job of the curriculum that has started and was not seen before."""
        with contextlib.suppress(WarmdError):
            jobs = daemon.client.jobs.several(
                daemon.client.groups.curriculum(curriculum_id)["jobs"]
            )
            started = [job["id"] for job in jobs if job["started_at"] and job["id"] not in known]
            return started[0] if started else None
        return None

    for number in range(5):  # train, eval before, eval after, train, eval after
        known.add(job_id := wait_until(newest, timeout_s=90))
        for process in daemon.processes():
            with contextlib.suppress(Exception):  # it may have ended just now
                if "warmd.daemon.groups" in process.cmdline():
                    process.kill()
        holder = daemon.client.rundir(job_id).holder()
        if holder is not None:
            os.kill(holder, signal.SIGKILL)
        if number == 2:
            daemon.kill("supervisor")
    killed = ended(daemon, curriculum_id)
    assert outcome(daemon, killed) == outcome(daemon, straight)


@pytest.mark.nightly(
    part="storms", catches="a curriculum that decides otherwise once Redis has lost everything"
)
def test_a_curriculum_equals_an_uninterrupted_one_if_redis_loses_everything_meanwhile(daemon):
    straight = ended(daemon, submit(daemon, "grpo"))
    curriculum_id = submit(daemon, "grpo")

    def has_begun(number: int) -> bool:
        """Whether so many jobs of the curriculum have begun."""
        with contextlib.suppress(WarmdError):
            jobs = daemon.client.jobs.several(
                daemon.client.groups.curriculum(curriculum_id)["jobs"]
            )
            return sum(job["started_at"] is not None for job in jobs) >= number
        return False

    for number in (2, 4):  # in an evaluation, and in the second stage
        wait_until(partial(has_begun, number), timeout_s=90)
        daemon.kill_everything()
        daemon.damage_redis()
        daemon.start()
    assert outcome(daemon, ended(daemon, curriculum_id)) == outcome(daemon, straight)


@pytest.mark.slow
def test_a_new_masked_language_model_of_the_first_stage_is_trained_further_by_the_others(
    shared_daemon, tmp_path
):
    home = mlm_jobs.make_home(tmp_path)
    values = {
        name: value
        for name, value in mlm_jobs.text_spec(home, tokenizer="train").to_json().items()
        if name != "model"
    }
    given = {"stages": [{"steps": 2}, {"steps": 3, "mlm_rate": 0.3}]}
    curriculum_id = str(shared_daemon.client.groups.submit_curriculum("mlm", values, given))
    found = ended(shared_daemon, curriculum_id)
    assert found["status"] == "finished", found["problem"]
    first, second = (attempt["job"] for attempt in found["attempts"])
    spec = shared_daemon.client.rundir(second).read_spec()["spec"]
    assert (spec["model"], spec["tokenizer"], spec["mlm_rate"]) == (first, None, 0.3)
