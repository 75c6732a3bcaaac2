"""Starts and stops that are killed, repeated or interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

import orjson
import psutil
import pytest
from daemons import Daemon, gone
from disturbing import STEPS, MakeDaemon, hold, let_go, processes_of, steps
from waiting import wait_until

from warmd.jobs.errors import WarmdError

pytestmark = pytest.mark.nightly(
    part="storms", catches="a start or stop that does not survive a kill, or leaves a process"
)


def warmd(daemon: Daemon, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "warmd.cli", "--home", str(daemon.home.path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str], *, timeout_s: float = 30.0) -> int:
    try:
        process.communicate(timeout=timeout_s)
    finally:
        process.kill()
        process.wait()
    return process.returncode


DEATHS = pytest.mark.nightly(
    part="storms", catches="a stop that hangs or loses a job as one of these processes dies"
)


@pytest.mark.parametrize(
    "trouble",
    [
        *("stop --now", "SIGTERM"),
        *(
            pytest.param(name, marks=DEATHS)
            for name in ("horse", "worker", "server", "supervisor", "zygote")
        ),
    ],
)
def test_stop_ends_soon_and_loses_nothing_whatever_happens_meanwhile(sturdy: Daemon, trouble: str):
    job_id = hold(sturdy)
    guardian = psutil.Process(sturdy.pid("supervisor")).parent()
    assert guardian is not None
    assert guardian.cmdline()[-2:] == ["-m", "warmd.daemon"]  # never anybody else's process
    is_victim = trouble not in ("stop --now", "SIGTERM")
    doomed = [psutil.Process(sturdy.pid(trouble))] if is_victim else []
    stopping = warmd(sturdy, "stop")
    wait_until(lambda: sturdy.status()["daemon"]["stopping"])
    for process in doomed:
        process.kill()
    if trouble == "stop --now":
        assert ended(warmd(sturdy, "stop", "--now")) == 0
    if trouble == "SIGTERM":
        guardian.terminate()
        guardian.terminate()
    let_go(sturdy)
    assert ended(stopping) == 0
    wait_until(lambda: not processes_of(sturdy.home) and gone(guardian))
    sturdy.start()
    job = sturdy.wait(job_id)
    assert (job["status"], job["execution"], steps(sturdy, job_id)) == ("finished", 2, STEPS)


def test_one_of_two_simultaneous_starts_is_refused(make_daemon: MakeDaemon):
    daemon = make_daemon()
    model = f"tiny={daemon.config.models[0].path}"
    starting = [warmd(daemon, "start", "--model", model) for _ in range(2)]
    assert sorted(ended(process) for process in starting) == [0, 2]
    assert daemon.wait(daemon.submit())["status"] == "finished"


def test_start_outlives_a_kill_of_the_supervisor_and_yields_to_a_stop(make_daemon: MakeDaemon):
    daemon = make_daemon()
    model = f"tiny={daemon.config.models[0].path}"
    starting = warmd(daemon, "start", "--model", model)
    state: Any = wait_until(daemon.home.read_state)
    os.kill(state["pid"], signal.SIGKILL)
    assert ended(starting) == 0
    daemon.stop()
    starting = warmd(daemon, "start", "--model", model)

    def stopped() -> bool:
        with contextlib.suppress(WarmdError):
            daemon.stop()
            return True
        return False

    wait_until(stopped)
    assert ended(starting) == 3
    assert not daemon.home.is_locked()


def test_a_signal_during_the_start_ends_the_daemon(make_daemon: MakeDaemon):
    daemon = make_daemon()
    daemon.home.create()
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-m", "warmd.daemon"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(orjson.dumps(daemon.config.to_json()))
        wait_until(psutil.Process(process.pid).children)
        process.terminate()
        assert process.wait(20) == 0
        assert not daemon.home.is_locked()
