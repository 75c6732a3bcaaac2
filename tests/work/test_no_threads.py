"""A machine that can start no thread or process fails no job: they wait, and say for what."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psutil
import pytest
from daemons import Daemon
from disturbing import MakeDaemon, hold, let_go
from process_limits import ProcessLimit, process_limit
from waiting import holds_for, wait_until

pytestmark = pytest.mark.nightly(
    part="shortages", catches="a job that fails for want of a thread or process"
)

SHORT = pytest.mark.nightly(
    part="shortages", catches="a job or a process that a few processes fewer or more end"
)


@pytest.fixture(scope="module")
def limit() -> Iterator[ProcessLimit]:
    with process_limit("warmd-no-threads") as limit:
        yield limit


@pytest.fixture(scope="module")
def limited_daemon(limit: ProcessLimit, daemons: MakeDaemon) -> Iterator[Daemon]:
    daemon = daemons()
    yield daemon
    limit.set(more=None)
    daemon.close()


@pytest.fixture
def limited(limited_daemon: Daemon, limit: ProcessLimit) -> Iterator[Daemon]:
    """A daemon, up and idle, whose processes are in the limited group, as all that it starts."""
    daemon = limited_daemon
    if not daemon.home.is_locked():
        daemon.start()
        for process in daemon.processes():
            limit.add(process.pid)
    wait_until(daemon.is_settled, timeout_s=60)
    yield daemon
    limit.set(more=None)
    (daemon.folder / "gate").unlink(missing_ok=True)
    if daemon.home.is_locked():
        daemon.leave_idle()


def logged(daemon: Daemon) -> Callable[[], str]:
    """What the daemon writes to its log from now on."""
    before = daemon.home.log.stat().st_size
    return lambda: daemon.home.log.read_bytes()[before:].decode()


@pytest.mark.parametrize("more", [pytest.param(0, marks=SHORT), 1, pytest.param(3, marks=SHORT)])
def test_jobs_wait_for_threads_and_no_retry_is_used(
    limited: Daemon, limit: ProcessLimit, more: int
):
    log = logged(limited)
    limit.set(more=more)
    jobs = [limited.submit(retries=1) for _ in range(2)]
    wait_until(lambda: limited.client.jobs.get(jobs[0])["waits_for"])
    assert "thread or process" in limited.client.jobs.get(jobs[0])["waits_for"]
    holds_for(1.0, lambda: limited.client.jobs.get(jobs[0])["status"] == "started")
    assert limited.client.jobs.get(jobs[1])["status"] == "queued"
    limit.set(more=None)
    for job_id in jobs:
        ended = limited.wait(job_id)
        assert (ended["status"], ended["retries_left"], ended["execution"]) == ("finished", 1, 1)
    # Whether a dead horse had lacked a thread can only be tested while the shortage lasts.
    assert "without a result" not in log()


def test_a_job_that_waits_for_threads_can_be_canceled(limited: Daemon, limit: ProcessLimit):
    limit.set(more=0)
    job_id = limited.submit()
    wait_until(lambda: limited.client.jobs.get(job_id)["waits_for"])
    limited.client.jobs.cancel(job_id)
    assert limited.wait(job_id)["status"] == "stopped"


@pytest.mark.parametrize(
    "name", ["supervisor", *(pytest.param(one, marks=SHORT) for one in ("worker", "zygote"))]
)
def test_a_process_that_dies_is_started_again_when_the_machine_can(
    limited: Daemon, limit: ProcessLimit, name: str
):
    job_id = hold(limited)
    log = logged(limited)
    victim = psutil.Process(limited.pid(name))
    limit.forbid()  # the processes that end make no room
    victim.kill()
    let_go(limited)
    wait_until(lambda: "no process" in log() or "no supervisor" in log())
    limit.set(more=None)
    assert limited.wait(job_id, timeout_s=120)["status"] == "finished"


def test_a_redis_that_dies_is_started_again_when_the_machine_can(
    limited: Daemon, limit: ProcessLimit
):
    job_id = hold(limited)
    log = logged(limited)
    supervisor, redis = (psutil.Process(limited.pid(name)) for name in ("supervisor", "server"))
    limit.forbid()
    redis.kill()
    let_go(limited)
    wait_until(lambda: "Redis: not restarted: the machine lacks a free thread" in log())
    holds_for(3.0, supervisor.is_running)
    limit.set(more=None)
    assert limited.wait(job_id, timeout_s=120)["status"] == "finished"


@pytest.mark.parametrize("beyond", [pytest.param(one, marks=SHORT) for one in (2, 3, 5, 9)])
def test_a_supervisor_that_lacks_processes_for_the_others_is_started_again(
    limited: Daemon, limit: ProcessLimit, beyond: int
):
    """The guardian has one thread; a supervisor and Redis need more than `beyond`."""
    job_id = hold(limited)
    guardian, supervisor = limited.processes()[:2]
    limit.forbid(beyond=beyond)
    supervisor.kill()
    let_go(limited)
    holds_for(8.0, guardian.is_running)
    limit.set(more=None)
    assert limited.wait(job_id, timeout_s=120)["status"] == "finished"
