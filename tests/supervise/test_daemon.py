"""The life cycle of a daemon: one start per home, its queue, drain, restarts of processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from daemons import Daemon, gone
from waiting import wait_until

from warmd.configs.config import ModelConfig, WorkerConfig
from warmd.daemon.client import control
from warmd.daemon.queue import keys, totals
from warmd.daemon.queue.jobs import JobStore
from warmd.daemon.queue.workers import WorkerRegistry
from warmd.daemon.runs.rundir import RunDir
from warmd.jobs.errors import Conflict, Unavailable, WarmdError
from warmd.jobs.infer.options import InferSpec

MakeDaemon = Callable[..., Daemon]

# No time limit anywhere: what is lost is noticed by other means.
NOTICED_S = 10.0


@pytest.fixture
def daemon(sturdy: Daemon) -> Daemon:
    """Whatever is done to it, it must come back for the next test."""
    return sturdy


@pytest.mark.nightly(part="homes", catches="processes that outlive the home of their daemon")
@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_daemon_whose_home_is_removed_ends_with_all_its_processes(
    make_daemon: MakeDaemon, is_replaced: bool
):
    daemon = make_daemon(http_port=0)
    daemon.start()
    job_id = daemon.submit("behaviours:gated")
    wait_until(lambda: daemon.client.jobs.get(job_id)["status"] == "started")
    processes = daemon.processes()
    assert len(processes) > 5
    daemon.client.close()
    if is_replaced:
        daemon.home.path.rename(daemon.home.path.with_name("moved"))
        daemon.home.create()
    else:
        # The daemon writes meanwhile.
        wait_until(lambda: removed(daemon.home.path))
    wait_until(lambda: all(map(gone, processes)), timeout_s=30)


def removed(folder: Path) -> bool:
    """Remove a folder that is being written to; return whether it is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


@pytest.mark.slow
def test_a_second_daemon_in_a_home_reports_where_the_first_runs(shared_daemon: Daemon):
    with pytest.raises(Conflict, match=f"pid {shared_daemon.pid('supervisor')}"):
        shared_daemon.start()


@pytest.mark.slow
def test_stop_leaves_no_process_and_requeues_the_running_job_which_the_next_start_finishes(
    daemon: Daemon,
):
    (daemon.folder / "gate").touch()
    job_id = daemon.submit("behaviours:gated", save_every=100)
    wait_until(lambda: len(daemon.events(job_id, "step")) == 2)
    processes = daemon.processes()
    stopping = subprocess.Popen(
        [sys.executable, "-m", "warmd.cli", "--home", str(daemon.home.path), "stop"]
    )
    wait_until(lambda: daemon.status()["daemon"]["stopping"])
    (daemon.folder / "gate").unlink()
    assert stopping.wait(30) == 0
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
    with pytest.raises(Unavailable, match="warmd start"):
        daemon.status()
    # Stopped at a step's end, with nothing lost although no checkpoint was due.
    step = daemon.events(job_id, "requeued")[0]["step"]
    assert step >= 3
    check_is_complete(daemon.start())
    status = daemon.status()
    assert status["zygote"]["state"] == "ready"
    assert [model["name"] for model in status["models"]] == ["tiny"]
    assert not Path(status["server"]["url"].removeprefix("unix://")).parent.stat().st_mode & 0o077
    job = daemon.wait(job_id)
    assert (job["status"], job["execution"], job["step"]) == ("finished", 2, 6)
    assert [event["step"] for event in daemon.events(job_id, "step")] == [1, 2, 3, 4, 5, 6]
    assert daemon.events(job_id, "begin")[1]["resumed_from"] == step


def check_is_complete(reports: list[dict[str, Any]]) -> None:
    """Check that a start has reported every part, and returned when the workers were warm."""
    stages = [report["stage"] for report in reports if report.get("done", True)]
    assert stages == ["server", "imports", "model", "ready"]
    assert all(report["seconds"] > 0 for report in reports if "seconds" in report)


@pytest.fixture(scope="module")
def untroubled(shared_daemon: Daemon) -> bytes:
    """The final weights of an uninterrupted job."""
    job_id = shared_daemon.submit()
    assert shared_daemon.wait(job_id)["status"] == "finished"
    return weights(shared_daemon, job_id)


@pytest.mark.parametrize(
    "victim",
    [
        *("horse", "server"),
        pytest.param("worker", marks=pytest.mark.slow),
        pytest.param(
            "zygote",
            marks=pytest.mark.nightly(
                part="storms", catches="a job that is lost or changed as only its zygote dies"
            ),
        ),
    ],
)
def test_after_any_process_is_killed_the_job_resumes_with_the_same_result(
    daemon: Daemon, untroubled: bytes, victim: str
):
    job_id = held(daemon)
    process = psutil.Process(daemon.pid(victim))
    process.kill()
    if victim == "horse":
        wait_until(lambda: daemon.events(job_id, "requeued"), timeout_s=NOTICED_S)
    wait_until(lambda: not process.is_running(), timeout_s=NOTICED_S)
    (daemon.folder / "gate").unlink()
    check_resumed(daemon, job_id, untroubled)
    wait_until(daemon.is_settled, timeout_s=60)
    assert all(worker["state"] == "idle" for worker in daemon.status()["workers"])


@pytest.mark.nightly(
    part="daemons", catches="a zygote that nothing starts again if it dies while a daemon recovers"
)
def test_a_supervisor_that_is_killed_and_the_zygote_of_its_successor_are_started_again(
    daemon: Daemon, untroubled: bytes
):
    job_id = held(daemon)
    old = daemon.pid("zygote")
    counted = totals.read(daemon.client.connection).restarted
    daemon.kill("supervisor")

    def warming() -> psutil.Process | None:
        with contextlib.suppress(psutil.Error, WarmdError):
            for process in psutil.Process(daemon.pid("supervisor")).children():
                if "warmd.daemon.fork.zygote" in process.cmdline() and process.pid != old:
                    return process
        return None

    wait_until(warming).kill()
    (daemon.folder / "gate").unlink()
    check_resumed(daemon, job_id, untroubled)
    now = totals.read(daemon.client.connection).restarted
    for process in ("supervisor", "zygote"):
        assert now[process] == counted.get(process, 0) + 1


@pytest.mark.slow
def test_after_all_processes_are_killed_every_job_of_the_queue_is_run(
    daemon: Daemon, untroubled: bytes
):
    running = held(daemon)
    popped, waiting = daemon.submit(), daemon.submit()
    # A worker of this home that popped a job and died before it began.
    worker = f"train-0:{daemon.home.key}:dead00"
    connection = daemon.client.connection
    registry = WorkerRegistry(JobStore(connection))
    registry.register(worker, "train", lease_s=60)
    connection.lmove("rq:queue:train", keys.taken(worker), "LEFT", "RIGHT")
    assert registry.taken(worker) == [popped.encode()]
    daemon.kill_everything()
    (daemon.folder / "gate").unlink()
    daemon.start()
    assert daemon.status()["zygote"]["state"] == "ready"
    check_resumed(daemon, running, untroubled)
    for job_id in (popped, waiting):
        job = daemon.wait(job_id)
        assert (job["status"], job["execution"]) == ("finished", 1)


def held(daemon: Daemon) -> str:
    """A job that has two checkpoints and waits in its third step."""
    (daemon.folder / "gate").touch()
    job_id = daemon.submit("behaviours:gated")
    wait_until((daemon.home.runs / job_id / "checkpoints" / "checkpoint-2").exists)
    return job_id


def check_resumed(daemon: Daemon, job_id: str, untroubled: bytes) -> None:
    """Check that the job ends as an uninterrupted one, with each step once."""
    job = daemon.wait(job_id)
    assert job["status"] == "finished", job["error"]
    assert [event["step"] for event in daemon.events(job_id, "step")] == [1, 2, 3, 4, 5, 6]
    assert weights(daemon, job_id) == untroubled


def weights(daemon: Daemon, job_id: str) -> bytes:
    """The bytes of a job's final model."""
    return (daemon.home.runs / job_id / "model" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_job_with_a_result_on_disk_is_not_run_again(daemon: Daemon):
    job_id = daemon.submit()
    wait_until(lambda: daemon.events(job_id, "started"))
    worker = daemon.pid("worker")
    os.kill(worker, signal.SIGSTOP)
    rundir = RunDir(daemon.home.runs / job_id)
    wait_until(rundir.read_result)
    os.kill(worker, signal.SIGKILL)
    job = daemon.wait(job_id)
    assert job["status"] == "finished"
    assert job["result"]["steps"] == 6
    assert len(daemon.events(job_id, "started")) == 1


def test_a_job_that_kills_its_horse_three_times_in_a_row_fails_with_the_reason(daemon: Daemon):
    job_id = daemon.submit("behaviours:dies", save_every=100)
    job = daemon.wait(job_id)
    assert (job["status"], job["execution"]) == ("failed", 3)
    assert "killed by SIGKILL, perhaps out of memory: peak" in job["error"]
    assert "3 times in a row" in job["error"]


@pytest.mark.slow
def test_a_retry_gives_a_job_that_kills_its_horse_three_more_tries(daemon: Daemon):
    job_id = daemon.submit("behaviours:dies", save_every=100, retries=1)
    job = daemon.wait(job_id)
    assert (job["status"], job["execution"]) == ("failed", 6)
    [retried] = [e for e in daemon.events(job_id, "requeued") if "retries_left" in e]
    assert "3 times in a row" in retried["reason"]


@pytest.mark.slow
def test_job_that_makes_progress_between_kills_is_not_given_up(daemon: Daemon):
    job_id = daemon.submit("behaviours:dies", save_every=1, samples=10)
    job = daemon.wait(job_id)
    assert job["status"] == "finished"
    assert job["execution"] > 3
    assert [event["step"] for event in daemon.events(job_id, "step")] == list(range(1, 11))


@pytest.mark.nightly(
    part="homes", catches="a daemon that ends because the folder of a warm model is gone"
)
def test_a_running_daemon_survives_the_removal_of_a_model_folder(
    make_daemon: MakeDaemon, tmp_path: Path
):
    daemon = make_daemon()
    folder = tmp_path / "model"
    shutil.copytree(daemon.config.models[0].path, folder)
    daemon.start()
    control.load_model(daemon.config, ModelConfig(name="passing", path=str(folder)))
    shutil.rmtree(folder)
    supervisor = daemon.pid("supervisor")
    daemon.kill("supervisor")
    wait_until(lambda: daemon.pid("supervisor") != supervisor)
    wait_until(daemon.is_settled, timeout_s=60)
    assert daemon.wait(daemon.submit())["status"] == "finished"
    assert [model["name"] for model in control.models(daemon.config)] == ["tiny"]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        pytest.param(
            *("train-0", "work.worker"),
            marks=pytest.mark.nightly(
                part="storms", catches="a daemon that goes on with a worker that never starts"
            ),
        ),
        pytest.param("zygote", "fork.zygote"),
    ],
)
def test_a_process_that_cannot_start_stops_the_daemon_with_a_message(
    make_daemon: MakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
):
    # Python runs this in every process of ours, and one of them does not survive it.
    code = f"import sys\nif 'warmd.daemon.{module}' in sys.orig_argv: sys.exit('no such luck')\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    daemon = make_daemon()
    with contextlib.suppress(WarmdError):
        daemon.start()  # the daemon may have reported itself warm before its worker died
    wait_until(lambda: not daemon.home.is_locked())
    log = daemon.home.log.read_text()
    assert f"{name} does not stay up (last ended with 1)" in log
    assert "no such luck" in log


@pytest.mark.slow
def test_unknown_model_does_not_start_a_daemon(make_daemon: MakeDaemon, tmp_path: Path):
    daemon = make_daemon()
    daemon.config.__dict__["models"] = (ModelConfig(name="none", path=str(tmp_path)),)
    with pytest.raises(WarmdError, match="it has none"):
        daemon.start()
    wait_until(lambda: not daemon.home.is_locked())


@pytest.fixture(scope="module")
def resident(daemons: MakeDaemon) -> Iterator[Daemon]:
    """A daemon with resident workers."""
    queues = (("train-0", "train"), ("infer-0", "infer"))
    started = daemons(
        workers=tuple(
            WorkerConfig(name=name, queue=queue, isolation="resident", threads=1)
            for name, queue in queues
        )
    )
    started.start()
    yield started
    started.close()


@pytest.mark.nightly(
    part="daemons", catches="a resident horse that trains on the weights of the job before"
)
def test_resident_horse_runs_one_job_after_another_on_fresh_weights(resident: Daemon):
    daemon = resident
    first, second = daemon.submit(), daemon.submit()
    for job_id in (first, second):
        assert daemon.wait(job_id)["status"] == "finished"
    assert weights(daemon, first) == weights(daemon, second)
    horses = {daemon.events(job_id, "started")[0]["pid"] for job_id in (first, second)}
    assert len(horses) == 1
    since_fork = [daemon.events(job_id, "started")[0]["fork_s"] for job_id in (first, second)]
    assert 0 < since_fork[0] < NOTICED_S
    assert since_fork[1] is None
    os.kill(horses.pop(), signal.SIGKILL)
    third = daemon.submit()
    assert daemon.wait(third)["status"] == "finished"
    assert weights(daemon, third) == weights(daemon, first)


@pytest.mark.nightly(
    part="daemons", catches="a resident horse that makes a new engine for each job"
)
def test_a_resident_horse_reuses_its_engine_for_the_next_job(resident: Daemon):
    daemon = resident
    spec = InferSpec.parse({"model": "tiny", "prompt": "a" * 40, "max_tokens": 2, "seed": 1})
    first, second = (daemon.wait(daemon.client.jobs.submit(spec))["result"] for _ in range(2))
    assert first["choices"] == second["choices"]
    cached = [result["usage"]["cached_tokens"] for result in (first, second)]
    assert cached == [0, 32]  # the whole chunks of the prompt
