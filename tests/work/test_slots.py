"""A resident worker with several slots: concurrent jobs in one horse are independent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import drill
import psutil
import pytest
import tiny
from daemons import Daemon, gone
from shell import warmd
from waiting import wait_until

from warmd.configs.config import ModelConfig, WorkerConfig
from warmd.daemon.client import control
from warmd.daemon.lifecycle.queueing import Queueing
from warmd.daemon.lifecycle.view import JobFilter
from warmd.jobs.infer.options import InferSpec

pytestmark = pytest.mark.slow

SLOTS = 4


@pytest.fixture(scope="module")
def shared(
    daemons: Callable[..., Daemon], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    """A daemon whose one worker runs four jobs at a time."""
    worker = WorkerConfig(name="infer-0", queue="infer", isolation="resident", slots=SLOTS)
    with drill.installed(tmp_path_factory.mktemp("site")):
        daemon = daemons(workers=(worker,))
        daemon.start()
        yield daemon
        daemon.close()


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """The same, with nothing left to do when the test is over."""
    yield shared
    gate(shared).unlink(missing_ok=True)
    wait_until(lambda: not shared.client.jobs.all(JobFilter(statuses=("queued", "started"))))


def gate(daemon: Daemon) -> Path:
    return daemon.folder / "gate"


def submit(daemon: Daemon, **options: Any) -> str:
    return daemon.client.jobs.submit(drill.DrillSpec.parse(options))


@contextmanager
def loaded(daemon: Daemon, model: ModelConfig) -> Iterator[None]:
    """Load a model for the duration of this test only."""
    control.load_model(daemon.config, model)
    try:
        yield
    finally:
        control.unload_model(daemon.config, model.name)


def hold(daemon: Daemon, number: int, **options: Any) -> list[str]:
    """Make some jobs run and wait at the gate."""
    gate(daemon).touch()
    ids = [submit(daemon, gate=str(gate(daemon)), **options) for _ in range(number)]
    wait_until(lambda: all(daemon.events(job_id, "begin") for job_id in ids))
    return ids


def pid_of(daemon: Daemon, job_id: str) -> int:
    """The process of the job's latest execution."""
    return int(daemon.events(job_id, "started")[-1]["pid"])


def ends(daemon: Daemon, ids: list[str]) -> list[str]:
    return [daemon.wait(job_id)["status"] for job_id in ids]


def test_jobs_run_at_the_same_time_in_one_process_on_one_model(daemon: Daemon):
    ids = hold(daemon, SLOTS)
    (worker,) = daemon.status()["workers"]
    assert (worker["slots"], sorted(worker["jobs"])) == (SLOTS, sorted(ids))
    gate(daemon).unlink()
    results = [daemon.wait(job_id)["result"] for job_id in ids]
    assert len({(result["pid"], result["model"]) for result in results}) == 1
    assert {daemon.events(job_id, "begin")[0]["thread"] for job_id in ids} == set(ids)


def test_job_beyond_the_slots_waits_in_the_queue(daemon: Daemon):
    ids = hold(daemon, SLOTS)
    waiting = submit(daemon)
    done, more = submit(daemon), submit(daemon)
    assert [daemon.client.jobs.get(job_id)["position"] for job_id in (waiting, done, more)] == [
        1,
        2,
        3,
    ]
    daemon.client.jobs.cancel(ids[0])
    assert daemon.wait(more)["status"] == "finished"  # all three, one after the other
    gate(daemon).unlink()
    assert ends(daemon, [*ids, waiting]) == ["stopped", *["finished"] * SLOTS]


def test_a_failed_or_canceled_job_does_not_affect_the_others(daemon: Daemon):
    canceled, killed, other = hold(daemon, 3)
    broken = submit(daemon, then="raise")
    job = daemon.wait(broken)
    assert (job["status"], job["error"]) == ("failed", "RuntimeError: as requested")
    assert "Traceback" in (daemon.home.runs / broken / "log.txt").read_text()
    daemon.client.jobs.cancel(canceled)
    daemon.client.jobs.kill(killed)
    assert ends(daemon, [canceled, killed]) == ["stopped", "stopped"]
    assert daemon.client.jobs.get(killed)["error"] == "killed on request"
    gate(daemon).unlink()
    assert daemon.wait(other)["execution"] == 1
    assert {pid_of(daemon, job_id) for job_id in (canceled, broken, other)} == {
        pid_of(daemon, killed)
    }


def test_cancel_takes_effect_within_fifty_milliseconds(daemon: Daemon):
    delays = []
    for job_id in hold(daemon, SLOTS):
        requested = time.time()
        daemon.client.jobs.cancel(job_id)
        daemon.wait(job_id)
        delays.append(daemon.events(job_id, "stopped")[0]["time"] - requested)
    assert min(delays) < 0.05  # the others may have met with a busy machine


def test_after_the_death_of_a_shared_horse_every_job_resumes_in_its_own(daemon: Daemon):
    ids = hold(daemon, SLOTS)
    old = pid_of(daemon, ids[0])
    os.kill(old, signal.SIGKILL)
    gate(daemon).unlink()
    assert ends(daemon, ids) == ["finished"] * SLOTS
    assert [daemon.client.jobs.get(job_id)["execution"] for job_id in ids] == [2] * SLOTS
    # Each in its own process: one of them may have been the cause.
    assert len({pid_of(daemon, job_id) for job_id in ids} | {old}) == SLOTS + 1
    fresh = [submit(daemon) for _ in range(2)]
    assert len({daemon.wait(job_id)["result"]["pid"] for job_id in fresh}) == 1


def test_a_job_that_kills_its_horse_fails_without_failing_others(daemon: Daemon):
    innocent = hold(daemon, SLOTS - 1)
    deadly = submit(daemon, then="die")
    wait_until(lambda: daemon.events(innocent[0], "requeued"))
    gate(daemon).unlink()
    job = daemon.wait(deadly)
    assert job["status"] == "failed"
    assert "3 times in a row" in job["error"]
    assert ends(daemon, innocent) == ["finished"] * len(innocent)
    assert {daemon.client.jobs.get(job_id)["execution"] for job_id in innocent} == {2}


def test_new_jobs_do_not_wait_for_suspects(daemon: Daemon):
    suspects = hold(daemon, SLOTS)
    os.kill(pid_of(daemon, suspects[0]), signal.SIGKILL)
    wait_until(lambda: all(daemon.events(job_id, "requeued") for job_id in suspects))
    assert daemon.wait(submit(daemon))["status"] == "finished"
    assert all(daemon.client.jobs.get(job_id)["status"] == "started" for job_id in suspects)
    gate(daemon).unlink()
    assert ends(daemon, suspects) == ["finished"] * SLOTS


def test_every_model_has_a_horse_until_it_is_unloaded(daemon: Daemon, tmp_path: Path):
    tiny.model(1).save_pretrained(tmp_path / "other")
    tiny.tokenizer().save_pretrained(tmp_path / "other")
    with loaded(daemon, ModelConfig(name="other", path=str(tmp_path / "other"))):
        first, other = (daemon.wait(submit(daemon, model=name)) for name in ("tiny", "other"))
        assert first["result"]["pid"] != other["result"]["pid"]
        again = daemon.wait(submit(daemon, model="tiny"))
        assert again["result"]["pid"] == first["result"]["pid"]
        horse = psutil.Process(other["result"]["pid"])
    wait_until(lambda: gone(horse))
    assert daemon.wait(submit(daemon, model="tiny"))["result"]["pid"] == first["result"]["pid"]


def test_a_horse_that_has_grown_gives_memory_back_or_is_replaced_when_idle(daemon: Daemon):
    pid = daemon.wait(submit(daemon))["result"]["pid"]
    for then in ("free", "end"):  # what was freed stays in the process, unless it is given back
        assert daemon.wait(submit(daemon, then=then))["result"]["pid"] == pid
    horse = psutil.Process(pid)
    (other,) = hold(daemon, 1)
    assert daemon.wait(submit(daemon, then="keep"))["result"]["pid"] == pid
    assert daemon.wait(submit(daemon))["result"]["pid"] == pid  # it is not idle
    gate(daemon).unlink()
    assert daemon.wait(other)["execution"] == 1
    wait_until(lambda: gone(horse))
    assert daemon.wait(submit(daemon))["result"]["pid"] != pid


def test_time_limit_ends_one_job_and_leaves_the_others(daemon: Daemon):
    (other,) = hold(daemon, 1)
    spec = drill.DrillSpec.parse({"gate": str(gate(daemon))})
    late = daemon.client.jobs.submit(spec, Queueing(timeout_s=1))
    job = daemon.wait(late)
    assert (job["status"], job["error"]) == ("failed", "took longer than its time limit of 1 s")
    gate(daemon).unlink()
    assert daemon.wait(other)["execution"] == 1


@pytest.mark.nightly(part="daemons", catches="a stop that loses one of several jobs of a horse")
def test_stop_requeues_every_running_job(shared: Daemon):
    ids = hold(shared, SLOTS)
    shared.stop()
    gate(shared).unlink()
    shared.start()
    assert ends(shared, ids) == ["finished"] * SLOTS
    assert [shared.client.jobs.get(job_id)["execution"] for job_id in ids] == [2] * SLOTS


def test_killed_worker_loses_none_of_its_jobs(shared: Daemon):
    ids = hold(shared, SLOTS)
    shared.kill("worker")
    gate(shared).unlink()
    assert ends(shared, ids) == ["finished"] * SLOTS


def test_inference_keeps_its_priority(daemon: Daemon):
    assert daemon.wait(submit(daemon))["result"]["niceness"] == os.nice(0)


def test_completions_use_the_precision_that_the_model_was_loaded_with(daemon, tmp_path):
    tiny.model().save_pretrained(tmp_path / "small")
    tiny.tokenizer().save_pretrained(tmp_path / "small")
    small = ModelConfig(name="small", path=str(tmp_path / "small"), precision="int8")
    with loaded(daemon, small):
        spec = InferSpec.parse({"model": "small", "prompt": "1+1=", "max_tokens": 2})
        jobs = [daemon.client.jobs.submit(one) for one in (spec, replace(spec, precision="native"))]
        for job_id, precision in zip(jobs, ("int8", "native"), strict=True):
            daemon.wait(job_id, "finished")
            assert daemon.client.jobs.result(job_id)["precision"] == precision


def test_models_are_listed_with_their_precision(daemon, tmp_path):
    tiny.model().save_pretrained(tmp_path / "small")
    tiny.tokenizer().save_pretrained(tmp_path / "small")
    home = daemon.home.path
    loaded = warmd("load", "--json", f"small={tmp_path / 'small'},precision=int8", home=home)
    assert loaded.objects[0]["precision"] == "int8"
    found = {model["name"]: model for model in warmd("models", "--json", home=home).objects}
    assert [found[name]["precision"] for name in ("tiny", "small")] == ["native", "int8"]
    head, *rows = (line.split() for line in warmd("models", home=home).out.splitlines())
    assert {row[0]: row[head.index("PRECISION")] for row in rows} == {
        "tiny": "native",
        "small": "int8",
    }
    control.unload_model(daemon.config, "small")
