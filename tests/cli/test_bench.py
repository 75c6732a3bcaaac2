"""`warmd bench mlm`: a short real job, and the projection of a long one."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from daemons import Daemon
from shell import CLEAN_ENVIRON, warmd
from transformers import BertConfig
from waiting import wait_until

from warmd.cli.view.projection import StepTimes, projection, step_times
from warmd.jobs.errors import Conflict, JobFailed, NotFound

COMMAND = [sys.executable, "-m", "warmd.cli"]


def event(type: str, at: float, step: int | None = None, **fields: Any) -> dict[str, Any]:
    return {"type": type, "time": at, "step": step, "execution": 1, "seq": 1, **fields}


def run(*seconds: float) -> list[dict[str, Any]]:
    """The events of a job whose steps end after these spans."""
    events = [event("started", 100.0), event("begin", 104.0)]
    at = 110.0
    for step, span in enumerate(seconds, start=1):
        at += span
        events.append(event("step", at, step))
    return events


def test_the_step_time_is_the_median_after_the_warmup():
    events = run(60, 50, 40, 2, 2, 30, 2, 2)
    times = step_times([*events, event("eval", 999.0, 8, seconds=7.5)], warm_up=3, eval_every=50)
    assert times == StepTimes(step_s=2.0, num_steps=5, startup_s=4.0, eval_s=7.5, eval_every=50)


def test_a_job_without_steps_to_measure_is_refused():
    with pytest.raises(JobFailed, match="after 3 steps: there is nothing to measure"):
        step_times(run(1, 1, 1), warm_up=3, eval_every=0)


def test_a_projection_counts_steps_and_the_evaluations_that_are_due():
    times = StepTimes(step_s=2.0, num_steps=10, startup_s=4.0, eval_s=30.0, eval_every=100)
    rows = {
        row["steps"]: row for row in projection(times, now=0, checkpoint=3500, steps_total=7000)
    }
    assert list(rows) == [100, 500, 1000, 3500, 6500, 7000, 10_000]
    assert rows[100] == {
        "steps": 100,
        "hours": (4 + 200 + 30) / 3600,
        "ends_at": 234.0,
        "hours_left": None,
        "resumed_ends_at": None,
    }
    assert rows[3500]["hours_left"] is None
    assert rows[10_000]["ends_at"] == 4 + 20_000 + 100 * 30
    assert rows[10_000]["resumed_ends_at"] == 4 + 13_000 + 65 * 30


def measurements(daemon: Daemon) -> set[str]:
    """Return the ids of the MLM jobs that the daemon lists; other tests may have left some."""
    return {job["id"] for job in daemon.client.jobs.all() if job["kind"] == "mlm"}


@pytest.fixture
def texts(tmp_path: Path) -> tuple[str, ...]:
    """The options of a tiny MLM job."""
    (tmp_path / "texts.jsonl").write_bytes(
        b"\n".join(
            orjson.dumps({"text": f"number {n}, then {n + 1}{' more' * (n % 9)}"})
            for n in range(80)
        )
    )
    BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    ).save_pretrained(tmp_path / "bert")
    options = {
        "objective": "mlm",
        "architecture": tmp_path / "bert",
        "data": tmp_path / "texts.jsonl",
        "vocab-size": 300,
        "seq-len": 32,
        "validation": 0.2,
        "gradient-accumulation": 2,
        "batch-size": 2,
        "steps": 6000,
    }
    return tuple(text for name, value in options.items() for text in (f"--{name}", str(value)))


def test_a_short_job_is_measured_for_the_projection_and_removed(shared_daemon: Daemon, texts):
    home = shared_daemon.home
    before = sorted(path.name for path in home.runs.iterdir())
    keys = set(shared_daemon.client.connection.keys("*mlm-*"))
    jobs = measurements(shared_daemon)
    done = warmd("bench", "mlm", "--measured", "4", *texts, "--json", home=home.path)
    assert done.code == 0, done.err
    [found] = done.objects
    assert (found["num_steps"], found["warm_up"], found["eval_every"]) == (4, 3, 100)
    assert 0 < found["micro_step_s"] == found["step_s"] / 2
    assert found["eval_s"] > 0
    assert [row["steps"] for row in found["projection"]] == [
        100,
        500,
        1000,
        3500,
        6000,
        6500,
        10000,
    ]
    assert sorted(path.name for path in home.runs.iterdir()) == before
    assert measurements(shared_daemon) == jobs
    assert set(shared_daemon.client.connection.keys("*mlm-*")) <= keys


@pytest.mark.slow
def test_the_options_of_a_job_are_projected_also_from_its_latest_checkpoint(
    shared_daemon: Daemon, texts
):
    home = shared_daemon.home
    options = ("--save-every", "60", "--eval-every", "0")
    job = warmd("submit", "mlm", *texts, *options, home=home.path).out.strip()
    wait_until(lambda: shared_daemon.events(job, "checkpoint"))
    shared_daemon.client.jobs.cancel(job)
    shared_daemon.wait(job, "stopped")
    done = warmd("bench", "mlm", "--job", job, "--measured", "2", home=home.path)
    assert done.code == 0, done.err
    checkpoint = shared_daemon.client.jobs.get(job)["step"]
    head, *rows = done.out.splitlines()
    assert head.split() == ["STEPS", "FROM", "ZERO", "DONE", "AT", "FROM", str(checkpoint), "DONE",
                            "AT"]  # fmt: skip
    assert [row.split()[0] for row in rows][-2:] == ["6,500", "10,000"]
    assert " a step, the median of 2 (2 micro-steps of " in done.err
    refused = warmd("bench", "mlm", "--job", job, "--seed", "1", home=home.path)
    assert refused.is_refusal(2)
    assert shared_daemon.client.jobs.get(job)["status"] == "stopped"
    shared_daemon.client.jobs.remove(job)


def test_a_measurement_that_fails_says_why_and_keeps_its_log(
    shared_daemon: Daemon, texts, tmp_path: Path
):
    config = tmp_path / "bert" / "config.json"
    config.write_bytes(
        orjson.dumps({**orjson.loads(config.read_bytes()), "initializer_range": 1e30})
    )
    before = measurements(shared_daemon)
    done = warmd("bench", "mlm", *texts, home=shared_daemon.home.path)
    assert done.is_refusal(1)
    [job] = measurements(shared_daemon) - before
    assert f"its log: warmd logs {job}" in done.err
    shared_daemon.client.jobs.remove(job)


CLOSED = pytest.mark.nightly(
    part="oracles", catches="a measurement that continues after its terminal was closed"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="ctrl-c"),
        pytest.param(signal.SIGHUP, id="closed", marks=CLOSED),
    ],
)
def test_ctrl_c_or_a_closed_terminal_ends_the_measurement_and_removes_its_job(
    shared_daemon: Daemon, texts, number
):
    home = shared_daemon.home
    environ = {**CLEAN_ENVIRON, "WARMD_HOME": str(home.path)}
    arguments = ["bench", "mlm", "--measured", "100000", *texts]
    before = measurements(shared_daemon)

    def jobs() -> set[str]:
        return measurements(shared_daemon) - before

    with subprocess.Popen([*COMMAND, *arguments], env=environ, stderr=subprocess.PIPE) as bench:
        wait_until(lambda: any(shared_daemon.events(job, "step") for job in jobs()))
        bench.send_signal(number)
        bench.communicate(timeout=30)
    assert bench.returncode == 130
    assert jobs() == set()


def test_only_a_job_that_has_ended_can_be_removed(shared_daemon: Daemon):
    client = shared_daemon.client
    job = shared_daemon.submit("behaviours:gated")
    shared_daemon.wait(job, "started")
    with pytest.raises(Conflict, match="is started: cancel it first"):
        client.jobs.remove(job)
    client.jobs.kill(job)
    shared_daemon.wait(job)
    client.jobs.remove(job)
    with pytest.raises(NotFound):
        client.jobs.get(job)
    assert not [key for key in client.connection.keys("*") if job.encode() in key]
