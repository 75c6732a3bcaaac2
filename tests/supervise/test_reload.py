"""`warmd reload`: new processes next to the old ones; no job is lost, whatever is killed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from daemons import Daemon, gone
from shell import CLEAN_ENVIRON
from waiting import wait_until

import warmd
from warmd.configs.config import WorkerConfig
from warmd.daemon.client import control
from warmd.daemon.host import installed
from warmd.daemon.host.installed import Package
from warmd.jobs.errors import WarmdError
from warmd.jobs.infer.options import InferSpec

pytestmark = pytest.mark.nightly(
    part="homes", catches="an upgrade of a running daemon that interrupts or loses a job"
)

STEPS = [1, 2, 3, 4, 5, 6]


@pytest.fixture(scope="module")
def reloaded(daemons) -> Iterator[Daemon]:
    """A daemon for all tests that reload it, with a worker of each isolation."""
    made = daemons(
        workers=(
            WorkerConfig(name="train-0", queue="train", threads=1),
            WorkerConfig(name="infer-0", queue="infer", isolation="resident", slots=4, threads=1),
        ),
    )
    made.start()
    yield made
    made.close()


@pytest.fixture
def daemon(reloaded: Daemon) -> Iterator[Daemon]:
    wait_until(lambda: _is_ready(reloaded) and len(_zygotes(reloaded)) == 1, timeout_s=60)
    (reloaded.folder / "calls").unlink(missing_ok=True)
    (reloaded.folder / "gate").touch()
    yield reloaded
    (reloaded.folder / "gate").unlink(missing_ok=True)
    reloaded.leave_idle()


def _is_ready(daemon: Daemon) -> bool:
    with contextlib.suppress(WarmdError):
        status = daemon.status()
        return status["zygote"]["state"] == "ready" and all(w["pid"] for w in status["workers"])
    return False


def begun(daemon: Daemon) -> str:
    """A job that has a checkpoint and waits in its third step."""
    job_id = daemon.submit("behaviours:gated")
    wait_until((daemon.home.runs / job_id / "checkpoints" / "checkpoint-2").exists)
    return job_id


def is_finished_once(daemon: Daemon, job_id: str) -> bool:
    job = daemon.wait(job_id)
    steps = [event["step"] for event in daemon.events(job_id, "step")]
    return job["status"] == "finished" and steps == STEPS


def answer(daemon: Daemon) -> str:
    job_id = daemon.client.jobs.submit(
        InferSpec.parse({"model": "tiny", "prompt": "1", "max_tokens": 2})
    )
    return str(daemon.wait(job_id)["status"])


def test_a_running_job_ends_unaffected_and_the_next_one_runs_in_new_processes(daemon: Daemon):
    running = begun(daemon)
    before = daemon.status()
    *_, last = control.reload(daemon.config)
    assert last == {"stage": "ready", "waiting": [{"worker": "train-0", "job": running}]}
    after = daemon.status()
    assert after["zygote"]["pid"] != before["zygote"]["pid"]
    pids = {w["name"]: (w["pid"], w["state"]) for w in after["workers"]}
    was = {w["name"]: w["pid"] for w in before["workers"]}
    assert pids["train-0"] == (was["train-0"], "reloads")
    assert pids["infer-0"][0] != was["infer-0"]
    assert answer(daemon) == "finished"
    waiting = daemon.submit()
    (daemon.folder / "gate").unlink()
    assert is_finished_once(daemon, running)
    assert len(daemon.events(running, "started")) == 1
    assert is_finished_once(daemon, waiting)
    wait_until(lambda: not psutil.pid_exists(before["zygote"]["pid"]))
    assert daemon.status()["workers"][0]["pid"] != was["train-0"]


OTHERS = pytest.mark.nightly(
    part="storms", catches="a job lost when one of these processes is killed during a reload"
)


@pytest.mark.parametrize(
    "victim",
    [
        "new zygote",
        *(
            pytest.param(name, marks=OTHERS)
            for name in ("supervisor", "old zygote", "old worker", "server")
        ),
    ],
)
def test_a_job_finishes_whichever_process_is_killed_during_a_reload(daemon: Daemon, victim: str):
    running = begun(daemon)
    before = daemon.status()
    outcome: list[str] = []

    def reload() -> None:
        try:
            outcome.append([p["stage"] for p in control.reload(daemon.config)][-1])
        except WarmdError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=reload)
    thread.start()
    new = wait_until(lambda: _zygotes(daemon) - {before["zygote"]["pid"]}, timeout_s=20)
    if victim == "new zygote":
        psutil.Process(new.pop()).kill()
        thread.join()
        assert "ended (-9) while it started; the daemon keeps its processes" in outcome[0]
        assert daemon.status()["zygote"]["pid"] == before["zygote"]["pid"]
    elif victim in ("supervisor", "server"):
        daemon.kill(victim)
        thread.join()
        assert outcome == ["ready"] if victim == "server" else outcome
    else:
        thread.join()
        name = before["zygote"] if victim == "old zygote" else before["workers"][0]
        psutil.Process(name["pid"]).kill()
    (daemon.folder / "gate").unlink()
    assert is_finished_once(daemon, running)
    assert answer(daemon) == "finished"
    assert is_finished_once(daemon, daemon.submit())


def _zygotes(daemon: Daemon) -> set[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(daemon.pid("supervisor")).children()
        return {p.pid for p in children if "warmd.daemon.fork.zygote" in p.cmdline()}
    return set()


def test_a_daemon_stopped_during_a_reload_leaves_no_process(daemon: Daemon):
    running = begun(daemon)
    before = daemon.pid("zygote")
    progress = control.reload(daemon.config)
    next(progress)
    wait_until(lambda: _zygotes(daemon) - {before}, timeout_s=20)
    with pytest.raises(WarmdError, match="reloads already"):
        list(control.reload(daemon.config))
    with pytest.raises(WarmdError, match="the daemon reloads: try again"):
        control.unload_model(daemon.config, "tiny")
    processes = daemon.processes()
    (daemon.folder / "gate").unlink()
    daemon.stop()
    wait_until(lambda: all(map(gone, processes)))  # the guardian ends after the supervisor
    daemon.start()
    assert is_finished_once(daemon, running)


def test_an_upgrade_is_a_change_of_version_or_of_files(tmp_path: Path):
    about = tmp_path / "torch-2.8.0.dist-info"
    about.mkdir()
    (about / "RECORD").write_text("torch/__init__.py,sha256=a,1")
    before = installed.refreshed({"torch": Package("", "", str(tmp_path))})
    assert installed.changes(before, installed.refreshed(before)) == []
    # Now it is old enough to be read only once.
    written = (about / "RECORD").stat().st_ctime
    wait_until(lambda: time.time() > written + 1.1)
    for _ in range(2):
        assert installed.changes(before, installed.refreshed(before)) == []
    (about / "RECORD").write_text("torch/__init__.py,sha256=b,1")
    assert installed.changes(before, installed.refreshed(before)) == [
        "torch 2.8.0 with other files"
    ]
    about.rename(tmp_path / "torch-2.9.0.dist-info")
    assert installed.changes(before, installed.refreshed(before)) == ["torch 2.8.0 -> 2.9.0"]
    (tmp_path / "torch-2.9.0.dist-info" / "RECORD").unlink()
    (tmp_path / "torch-2.9.0.dist-info").rmdir()
    gone = installed.changes(before, installed.refreshed(before))
    assert gone == ["torch 2.8.0 -> not installed"]
    assert installed.from_json(installed.to_json(before)) == before
    assert installed.from_json("what an earlier version wrote") == {}


def test_an_upgrade_is_reported_and_applied_by_reload_or_restart(tiny_model: Path):
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        package = Path(folder, "site", "warmd")
        shutil.copytree(Path(warmd.__file__).parent, package)
        home = Path(folder, "home")
        home.mkdir()
        (home / "config.yaml").write_text(f"models: [tiny={tiny_model}]\nhttp_port: null\n")
        environ = {**CLEAN_ENVIRON, "PYTHONPATH": str(package.parent), "WARMD_HOME": str(home)}

        def run(*words: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "warmd.cli", *words]
            return subprocess.run(
                command, env=environ, capture_output=True, text=True, cwd=folder, timeout=120
            )

        assert run("start").returncode == 0
        try:
            assert "upgraded" not in run("status").stderr
            with open(package / "__init__.py", "a") as file:
                file.write("# changed\n")
            said = "upgraded since the daemon started: warmd 0.1.0 with other files: `warmd reload`"
            assert said in run("status").stderr
            assert "warmd 0.1.0 with other files: `warmd reload`" in run("start").stderr
            done = run("reload")
            assert done.stdout.startswith("reloaded in ")
            assert "warmd 0.1.0 with other files" in done.stderr
            notes = run("status").stderr
            assert "supervisor and gateway still run the old version" in notes
            with open(package / "daemon" / "host" / "messages.py", "a") as file:
                file.write("# changed\n")
            refused = run("reload")
            assert refused.returncode == 2
            assert "`warmd stop`, then `warmd start`; unfinished jobs resume" in refused.stderr
        finally:
            run("stop")


def test_reload_without_a_daemon_is_refused(tmp_path: Path):
    from shell import warmd as shell

    done = shell("reload", home=tmp_path / "home")
    assert done.is_refusal(3)
    assert "start it with `warmd start`" in done.err
