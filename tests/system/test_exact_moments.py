"""Kills, cancels, hangs and sleep at the moments at which they could lose or repeat a job."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import psutil
import pytest
from daemons import Daemon, gone
from disturbing import STEPS, MakeDaemon, frozen, hold, let_go, pids, steps, wait_for
from waiting import wait_until

from warmd.daemon.queue import keys
from warmd.daemon.queue.keys import LEASE_S
from warmd.daemon.supervise.children import HUNG_S
from warmd.jobs.errors import WarmdError

pytestmark = pytest.mark.nightly(
    part="storms", catches="a job that is lost or run twice by a kill at one exact moment"
)


def pop(daemon: Daemon) -> None:
    """Do what Redis does for a worker that it can no longer notify."""
    connection = daemon.client.connection
    names = [keys.text(name) for name in connection.hkeys(keys.WORKERS)]
    (name,) = (name for name in names if daemon.home.key in name)
    assert connection.lmove("rq:queue:train", keys.taken(name), "LEFT", "RIGHT")


def test_a_job_whose_pop_the_worker_never_received_is_run(battered: Daemon):
    with frozen(battered, "worker"):
        job_id = battered.submit()
        pop(battered)
    assert battered.wait(job_id)["execution"] == 1


def test_a_cancel_at_the_moment_of_the_pop_removes_the_job(battered: Daemon):
    with frozen(battered, "worker"):
        job_id = battered.submit()
        pop(battered)
        assert battered.client.jobs.cancel(job_id) == "canceled"
    wait_until(lambda: not battered.client.connection.keys("warmd:taken:*"))
    assert battered.wait(job_id)["execution"] == 0
    assert battered.client.jobs.resume(job_id) == "queued"
    assert battered.wait(job_id)["status"] == "finished"


def test_one_of_many_simultaneous_resumes_succeeds(battered: Daemon):
    job_id = hold(battered)
    battered.client.jobs.kill(job_id)
    assert battered.wait(job_id)["status"] == "stopped"
    let_go(battered)
    answers: list[str] = []

    def resume() -> None:
        daemon = Daemon(battered.home.path, Path("unused"))
        try:
            answers.append(daemon.client.jobs.resume(job_id))
        except WarmdError as error:
            answers.append(type(error).__name__)
        finally:
            daemon.client.close()

    threads = [threading.Thread(target=resume) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert battered.wait(job_id)["execution"] == 2
    assert Counter(answers) == {"queued": 1, "Conflict": 7}
    assert steps(battered, job_id) == STEPS


def test_checking_the_lock_of_a_home_does_not_prevent_a_start(make_daemon: MakeDaemon):
    home = make_daemon().home
    home.create()
    os.close(home.lock())
    looking = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys, pathlib; from warmd.daemon.host.home import Home\n"
            "home = Home(pathlib.Path(sys.argv[1]))\nprint(flush=True)\n"
            "while True: home.is_locked()",
            str(home.path),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert looking.stdout is not None
        with looking.stdout as said:
            said.readline()
            for _ in range(300):
                os.close(home.lock())
    finally:
        looking.kill()
        looking.wait()


def test_two_horses_never_write_to_one_run_directory(sturdy: Daemon):
    job_id = hold(sturdy)
    horse = psutil.Process(sturdy.pid("horse"))
    horse.suspend()  # it cannot see that its worker is dead
    sturdy.kill("worker")
    wait_until(lambda: gone(horse), timeout_s=10)
    let_go(sturdy)
    job = sturdy.wait(job_id)
    assert (job["status"], job["execution"], steps(sturdy, job_id)) == ("finished", 2, STEPS)


@pytest.mark.parametrize("victim", ["zygote", "worker"])
def test_kill_between_the_request_for_a_horse_and_its_fork(sturdy: Daemon, victim: str):
    zygote, worker = (psutil.Process(sturdy.pid(name)) for name in ("zygote", "worker"))
    zygote.suspend()
    job_id = sturdy.submit()
    sturdy.wait(job_id, "started")
    (zygote if victim == "zygote" else worker).kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        zygote.resume()
    assert sturdy.wait(job_id)["status"] == "finished"
    assert steps(sturdy, job_id) == STEPS


def test_cancel_while_the_zygote_is_dead(sturdy: Daemon):
    sturdy.kill("zygote")
    job_id = sturdy.submit(samples=40, save_every=100)
    sturdy.wait(job_id, "started")
    assert sturdy.client.jobs.cancel(job_id) == "stopping"
    assert sturdy.wait(job_id)["status"] == "stopped"


def test_kill_in_the_middle_of_a_checkpoint(sturdy: Daemon):
    job_id = sturdy.submit(samples=40, save_every=1)
    folder = sturdy.home.runs / job_id / "checkpoints"

    def is_saving(execution: int) -> psutil.Process | None:
        """The horse of an execution that saves now, and has saved before: it makes progress."""
        found = [event for event in sturdy.events(job_id) if event["execution"] == execution]
        if "checkpoint" in [event["type"] for event in found] and list(folder.glob(".staging-*")):
            return psutil.Process(found[0]["pid"])
        return None

    for execution in (1, 2, 3, 4):
        wait_until(partial(is_saving, execution)).kill()
    job = sturdy.wait(job_id)
    assert (job["status"], steps(sturdy, job_id)) == ("finished", list(range(1, 41)))
    assert not list(folder.glob(".*"))


def test_sleep_of_the_whole_machine_loses_and_repeats_nothing(sturdy: Daemon):
    job_id = hold(sturdy)
    before = pids(sturdy)
    asleep = sturdy.processes()
    for process in asleep:
        process.suspend()
    wait_for(LEASE_S + 1)
    for process in reversed(asleep):
        process.resume()
    let_go(sturdy)
    job = sturdy.wait(job_id)
    assert (job["status"], job["execution"], steps(sturdy, job_id)) == ("finished", 1, STEPS)
    assert pids(sturdy) == before


def test_a_redis_that_hangs_longer_than_the_lease_loses_and_repeats_no_job(sturdy: Daemon):
    job_id = hold(sturdy)
    before = pids(sturdy)
    server = psutil.Process(sturdy.pid("server"))
    server.suspend()
    wait_for(LEASE_S + 2)
    server.resume()
    let_go(sturdy)
    job = sturdy.wait(job_id)
    assert (job["status"], job["execution"], steps(sturdy, job_id)) == ("finished", 1, STEPS)
    assert pids(sturdy) == before


def test_jobs_of_a_redis_that_is_flushed_keep_their_files_and_are_resumed(sturdy: Daemon):
    running = hold(sturdy)
    waiting = sturdy.submit()
    horse = psutil.Process(sturdy.pid("horse"))
    sturdy.client.connection.flushall()
    wait_until(lambda: gone(horse))
    let_go(sturdy)
    (warning,) = wait_until(lambda: sturdy.events(running, "warning"))
    assert warning["message"].startswith("stopped: the job's record in Redis has gone")
    # The supervisor writes what the worker says.
    said = f"{running}: stopped: Redis no longer has execution 1"
    wait_until(lambda: said in sturdy.home.log.read_text())
    # The worker runs new jobs, and the two lost ones once `resume` has registered them in Redis.
    assert sturdy.wait(sturdy.submit())["status"] == "finished"
    for job_id in (running, waiting):
        assert sturdy.client.jobs.get(job_id)["status"] == "unregistered"
        assert sturdy.client.jobs.resume(job_id) == "queued"
        assert sturdy.wait(job_id)["status"] == "finished"
        assert steps(sturdy, job_id) == STEPS


def test_a_redis_that_is_full_delays_jobs_and_loses_none(sturdy: Daemon):
    job_id = hold(sturdy)
    connection = sturdy.client.connection
    connection.config_set("maxmemory", "1")
    try:
        let_go(sturdy)
        wait_until(lambda: steps(sturdy, job_id) == STEPS)
        with pytest.raises(WarmdError, match=r"Redis takes no changes: .*maxmemory"):
            sturdy.submit()
        wait_for(1.0)  # the worker tries to report the end
    finally:
        connection.config_set("maxmemory", "0")
    job = sturdy.wait(job_id)
    assert (job["status"], job["execution"], steps(sturdy, job_id)) == ("finished", 1, STEPS)
    assert sturdy.wait(sturdy.submit())["status"] == "finished"


def test_stop_is_quick_while_redis_hangs_and_start_resumes_the_job(sturdy: Daemon):
    job_id = hold(sturdy)
    doomed = sturdy.processes()
    psutil.Process(sturdy.pid("server")).suspend()
    let_go(sturdy)
    begun = time.monotonic()
    sturdy.stop()
    assert time.monotonic() - begun < 8
    wait_until(lambda: all(map(gone, doomed)))
    sturdy.start()
    job = sturdy.wait(job_id)
    assert (job["status"], steps(sturdy, job_id)) == ("finished", STEPS)


def test_worker_that_hangs_is_replaced_and_its_job_resumed(sturdy: Daemon):
    job_id = hold(sturdy)
    worker = psutil.Process(sturdy.pid("worker"))
    worker.suspend()
    wait_until(lambda: gone(worker), timeout_s=3 * HUNG_S)
    let_go(sturdy)
    job = sturdy.wait(job_id)
    assert (job["status"], job["execution"], steps(sturdy, job_id)) == ("finished", 2, STEPS)
    assert "train-0: hangs: no heartbeat" in sturdy.home.log.read_text()


def test_gateway_that_hangs_is_replaced(make_daemon: MakeDaemon):
    daemon = make_daemon(http_port=0)
    daemon.start()
    wait_until(lambda: daemon.status()["http"]["url"])
    gateway = psutil.Process(daemon.status()["http"]["pid"])
    wait_for(HUNG_S + 2)
    assert daemon.status()["http"]["pid"] == gateway.pid  # it is only idle
    gateway.suspend()
    wait_until(lambda: gone(gateway), timeout_s=3 * HUNG_S)
    wait_until(lambda: daemon.status()["http"]["url"], timeout_s=20)
    assert daemon.status()["http"]["pid"] != gateway.pid


def test_status_replies_while_the_zygote_is_busy(sturdy: Daemon):
    zygote = psutil.Process(sturdy.pid("zygote"))
    zygote.suspend()  # as in a load that takes minutes
    try:
        begun = time.monotonic()
        status = sturdy.status()
        assert time.monotonic() - begun < 4
        assert status["zygote"]["state"] == "loading"
    finally:
        zygote.resume()
    wait_until(sturdy.is_settled)
