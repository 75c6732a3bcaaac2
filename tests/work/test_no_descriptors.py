"""Processes without a free file descriptor fail no job: they wait, and say for what.

The limits are real ones (RLIMIT_NOFILE), set for running processes of a daemon.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from daemons import Daemon
from disturbing import STEPS, MakeDaemon, hold, let_go, steps, weights
from shell import warmd
from waiting import holds_for, wait_until

from warmd.jobs.errors import Unavailable

pytestmark = pytest.mark.nightly(
    part="shortages", catches="a job that fails for want of a file descriptor"
)

WHAT = "a free file descriptor (limit of open files)"


class Limited:
    """A process of a daemon whose number of open files can be limited."""

    def __init__(self, daemon: Daemon, name: str) -> None:
        self._daemon, self._name = daemon, name
        self.process = psutil.Process(daemon.pid(name))
        if name == "zygote" and self._has_high_reserve():
            self.process.kill()
            wait_until(lambda: daemon.is_settled() and daemon.pid(name) != self.process.pid)
            self.process = psutil.Process(daemon.pid(name))

    def _has_high_reserve(self) -> bool:
        """Whether descriptors below the reserved one are free: it would be above a limit there.

        Earlier tests may have closed some that were opened before it. A limit that no process has
        while it runs would make its reserve useless.
        """
        used = self._used()
        folder = Path(f"/proc/{self.process.pid}/fd")
        reserved = [one for one in used if one > 2 and os.readlink(folder / str(one)) == os.devnull]
        return any(one >= _free(used)[0] for one in reserved)

    def allow(self, *, more: int) -> None:
        """Allow this many more open files than it has."""
        _, most = self.process.rlimit(psutil.RLIMIT_NOFILE)
        now = _free(self._used())[more]  # descriptors are below the limit
        self.process.rlimit(psutil.RLIMIT_NOFILE, (now, most))

    def lift(self) -> None:
        _, most = self.process.rlimit(psutil.RLIMIT_NOFILE)
        self.process.rlimit(psutil.RLIMIT_NOFILE, (most, most))

    def _used(self) -> set[int]:
        """Its descriptors, once it neither opens nor closes any."""
        if self._name == "zygote":  # it reads a file while it moves its memory after a job
            wait_until(lambda: self._daemon.status()["zygote"].get("settled"), timeout_s=60)
        folder = Path(f"/proc/{self.process.pid}/fd")
        seen: list[set[int]] = []

        def is_idle() -> bool:
            seen.append({int(one.name) for one in folder.iterdir()})
            time.sleep(0.05)
            return len(seen) >= 10 and all(one == seen[-1] for one in seen[-10:])

        wait_until(is_idle)
        return seen[-1]


def _free(used: set[int]) -> list[int]:
    """The lowest numbers that a process may give to descriptors."""
    return [number for number in range(len(used) + 20) if number not in used]


Limit = Callable[[Daemon, str], Limited]


@pytest.fixture
def limit() -> Iterator[Limit]:
    """Makes processes whose limit is lifted at the end, also of a test that fails."""
    made: list[Limited] = []

    def make(daemon: Daemon, name: str) -> Limited:
        made.append(Limited(daemon, name))
        return made[-1]

    yield make
    for one in made:
        with suppress(psutil.Error):
            one.lift()


def waits_for(daemon: Daemon, job_id: str) -> Any:
    return daemon.client.jobs.get(job_id)["waits_for"]


def check_ended(daemon: Daemon, job_id: str) -> None:
    ended = daemon.wait(job_id)
    assert (ended["status"], ended["waits_for"]) == ("finished", None)
    assert (ended["retries_left"], ended["execution"]) == (1, 1)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("zygote", 0),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("worker", 0), ("zygote", 1))),
    ],
)
def test_jobs_wait_for_descriptors_and_no_retry_is_used(
    sturdy: Daemon, name: str, more: int, limit: Limit
):
    assert sturdy.wait(sturdy.submit())["status"] == "finished"  # its connections are open now
    wait_until(sturdy.is_settled)  # a horse that ends later would free descriptors of the zygote
    limited = limit(sturdy, name)
    limited.allow(more=more)
    jobs = [sturdy.submit(retries=1) for _ in range(2)]
    assert wait_until(lambda: waits_for(sturdy, jobs[0])) == WHAT
    holds_for(1.0, lambda: sturdy.client.jobs.get(jobs[0])["status"] == "started")
    assert WHAT in warmd("queue", home=sturdy.home.path).out
    limited.lift()
    for job_id in jobs:
        check_ended(sturdy, job_id)


def test_the_first_job_of_a_worker_that_can_open_nothing_stays_queued(daemon: Daemon, limit: Limit):
    limited = limit(daemon, "worker")
    limited.allow(more=0)
    job_id = daemon.submit(retries=1)
    wait_until(lambda: f"lacks {WHAT}" in daemon.home.log.read_text())
    holds_for(2.0, lambda: daemon.client.jobs.get(job_id)["status"] == "queued")
    limited.lift()
    check_ended(daemon, job_id)


def test_a_job_that_has_taken_all_descriptors_continues_in_a_new_process(
    sturdy: Daemon, limit: Limit
):
    undisturbed = sturdy.submit(save_every=1)
    assert sturdy.wait(undisturbed)["status"] == "finished"
    job_id = hold(sturdy, retries=1)
    horse = limit(sturdy, "horse")
    horse.allow(more=0)
    let_go(sturdy)
    check_ended(sturdy, job_id)
    assert steps(sturdy, job_id) == STEPS
    pids = [event["pid"] for event in sturdy.events(job_id, "started")]
    assert [pid == horse.process.pid for pid in pids] == [True, False]
    assert weights(sturdy, job_id) == weights(sturdy, undisturbed)
    assert "Too many open files" in sturdy.client.rundir(job_id).log.read_text()


def test_a_job_that_waits_for_descriptors_can_be_canceled(sturdy: Daemon, limit: Limit):
    assert sturdy.wait(sturdy.submit())["status"] == "finished"  # its connections are open now
    wait_until(sturdy.is_settled)  # a horse that ends later would free descriptors of the zygote
    limited = limit(sturdy, "zygote")
    limited.allow(more=0)
    job_id = sturdy.submit()
    wait_until(lambda: waits_for(sturdy, job_id))
    sturdy.client.jobs.cancel(job_id)
    assert sturdy.wait(job_id)["status"] == "stopped"
    limited.lift()


def test_a_supervisor_without_descriptors_answers_and_starts_processes_later(
    sturdy: Daemon, limit: Limit
):
    limited, worker = limit(sturdy, "supervisor"), limit(sturdy, "worker")
    limited.allow(more=0)
    worker.process.kill()
    wait_until(lambda: "start no process: Too many open files" in sturdy.home.log.read_text())
    with pytest.raises(Unavailable, match="Too many open files"):
        sturdy.status()
    limited.lift()
    job_id = sturdy.submit()
    assert sturdy.wait(job_id)["status"] == "finished"


def test_a_supervisor_without_descriptors_can_be_stopped(sturdy: Daemon):
    Limited(sturdy, "supervisor").allow(more=0)
    sturdy.stop()
    assert not sturdy.home.is_locked()


def test_a_daemon_uses_as_many_descriptors_as_it_may(make_daemon: MakeDaemon):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        daemon = make_daemon()
        daemon.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for name in ("supervisor", "zygote", "worker"):
        limits = psutil.Process(daemon.pid(name)).rlimit(psutil.RLIMIT_NOFILE)
        assert limits == (min(hard, 65_536), hard)


@pytest.mark.parametrize("command", [["queue"], ["submit", "grpo", "--model", "tiny"], ["status"]])
def test_a_command_without_descriptors_says_so_in_one_line(sturdy: Daemon, command: list[str]):
    limited = (
        "import resource, sys; from warmd.cli.main import main; "
        "import warmd.cli.commands.jobs, warmd.cli.commands.submit, warmd.cli.commands.control; "
        "import warmd.daemon.client.client, warmd.daemon.client.control; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); "
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, "--home", str(sturdy.home.path), *command],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert "Too many open files" in done.stderr
