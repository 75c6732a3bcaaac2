"""A full disk fails nothing: jobs wait for space, say so, can be stopped, and end like others.

The run directories of a real daemon are on a real file system that is full.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon
from disturbing import MakeDaemon, hold, let_go, steps, weights
from shell import warmd
from small_disks import FILLER, fill, fill_inodes, make_room, quota, small_disk, use_up
from waiting import holds_for, wait_until

from warmd.daemon.client import control

pytestmark = pytest.mark.nightly(
    part="shortages", catches="a job that a full disk fails or changes"
)

SHORT = pytest.mark.nightly(
    part="shortages", catches="a command or a process that a job's wait for space holds up"
)
LONG = 40  # steps, whose events fill more than the pages that the files have already


def on_small_disk(daemon: Daemon, folder: Path, size: str, *, inodes: int = 0) -> Iterator[Daemon]:
    """A daemon with a folder on a small disk, which it finds when it starts."""
    folder.mkdir(mode=0o700, parents=True)
    daemon.home.path.chmod(0o700)
    with small_disk(folder, size, inodes=inodes):
        yield daemon
        daemon.close()


def emptied(daemon: Daemon, disk: Path) -> Iterator[Daemon]:
    """The daemon, up and idle, with nothing of earlier tests on its small disk."""
    if not daemon.home.is_locked():
        daemon.start()
    wait_until(daemon.is_settled, timeout_s=60)
    yield daemon
    (daemon.folder / "gate").unlink(missing_ok=True)
    if (disk / FILLER).exists():
        make_room(disk)
    if daemon.home.is_locked():
        daemon.leave_idle()
        for ended in daemon.client.jobs.all():
            daemon.client.jobs.remove(ended["id"])


@pytest.fixture(scope="module")
def daemon_of_small_runs(daemons: MakeDaemon) -> Iterator[Daemon]:
    daemon = daemons()
    yield from on_small_disk(daemon, daemon.home.runs, "6m", inodes=300)


@pytest.fixture
def full(daemon_of_small_runs: Daemon) -> Iterator[Daemon]:
    """A daemon whose run directories are on a disk of six megabytes and 300 files."""
    yield from emptied(daemon_of_small_runs, daemon_of_small_runs.home.runs)


def job(daemon: Daemon, job_id: str) -> dict[str, Any]:
    return daemon.client.jobs.get(job_id)


def check_events(daemon: Daemon, job_id: str) -> None:
    """Check that the file and the stream have each event of an ended job once, in order."""
    events = daemon.events(job_id)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    in_redis = daemon.streamed(job_id)
    assert in_redis == events[-len(in_redis) :]


def wait_for_waiting(daemon: Daemon, job_id: str) -> str:
    waits_for: str = wait_until(lambda: job(daemon, job_id)["waits_for"])
    return waits_for


def hold_and_fill(daemon: Daemon, **options: Any) -> str:
    """Run a job until a write of it meets the full disk."""
    job_id = hold(daemon, samples=LONG, **options)
    fill(daemon.home.runs)
    let_go(daemon)
    wait_for_waiting(daemon, job_id)
    return job_id


def test_jobs_wait_for_space_and_end_with_the_bits_of_undisturbed_ones(full: Daemon):
    runs = full.home.runs
    undisturbed = full.submit(samples=LONG, save_every=1)
    assert full.wait(undisturbed)["status"] == "finished"
    job_id = hold(full, samples=LONG, retries=1)
    following = [full.submit(samples=LONG, save_every=1, retries=1) for _ in range(2)]
    fill(runs)
    let_go(full)
    assert wait_for_waiting(full, job_id) == f"space in {runs / job_id}"
    waiting = [event for event in full.streamed(job_id) if event["type"] == "waiting"]
    assert [event["reason"] for event in waiting] == ["No space left on device"]
    holds_for(1.0, lambda: job(full, job_id)["status"] == "started")
    assert [job(full, one)["status"] for one in following] == ["queued", "queued"]
    make_room(runs)
    for one in (job_id, *following):
        ended = full.wait(one)
        assert (ended["status"], ended["waits_for"], ended["retries_left"]) == ("finished", None, 1)
        assert ended["execution"] == 1
        assert steps(full, one) == list(range(1, LONG + 1))
        assert weights(full, one) == weights(full, undisturbed)
    check_events(full, job_id)
    types = [event["type"] for event in full.events(job_id)]
    assert types.index("waiting") < types.index("waited")


@SHORT
def test_a_job_that_begins_on_a_full_disk_waits(full: Daemon):
    runs = full.home.runs
    first = hold(full, samples=LONG)
    job_id = full.submit(samples=LONG)
    fill(runs)
    full.client.jobs.kill(first)
    let_go(full)
    assert full.wait(first)["status"] == "stopped"
    assert "space in" in wait_for_waiting(full, job_id)
    make_room(runs)
    assert full.wait(job_id)["status"] == "finished"


@SHORT
def test_a_job_waits_for_inodes(full: Daemon):
    runs = full.home.runs
    undisturbed = full.submit(samples=6, save_every=1)
    assert full.wait(undisturbed)["status"] == "finished"
    job_id = hold(full)
    fill_inodes(runs)
    let_go(full)  # no checkpoint can be written, and at last no model
    wait_for_waiting(full, job_id)
    make_room(runs)
    assert full.wait(job_id)["status"] == "finished"
    assert weights(full, job_id) == weights(full, undisturbed)


def test_a_job_waits_while_the_quota_is_used_up(make_daemon: MakeDaemon, tmp_path: Path):
    daemon = make_daemon()
    runs = daemon.home.runs
    runs.mkdir(mode=0o700, parents=True)
    daemon.home.path.chmod(0o700)
    with quota(runs, tmp_path / "disk.img", "24M"):
        daemon.start()
        undisturbed = daemon.submit(samples=6, save_every=1)
        assert daemon.wait(undisturbed)["status"] == "finished"
        job_id = hold(daemon, retries=1)
        use_up(runs)
        let_go(daemon)
        assert wait_for_waiting(daemon, job_id) == f"space in {runs / job_id}"
        waiting = [event for event in daemon.streamed(job_id) if event["type"] == "waiting"]
        assert waiting[0]["reason"] == "Disk quota exceeded"
        done = warmd("submit", "grpo", "--model", "tiny", "--samples", "2", home=daemon.home.path)
        assert done.code, done.out
        assert "Disk quota exceeded" in done.err
        make_room(runs)
        ended = daemon.wait(job_id)
        assert (ended["status"], ended["retries_left"], ended["execution"]) == ("finished", 1, 1)
        assert weights(daemon, job_id) == weights(daemon, undisturbed)
        check_events(daemon, job_id)
        daemon.close()


@SHORT
def test_the_daemon_reloads_while_a_job_waits(full: Daemon):
    job_id = hold(full, samples=LONG, retries=1)
    following = full.submit(samples=LONG)
    zygote = full.pid("zygote")
    fill(full.home.runs)
    let_go(full)
    wait_for_waiting(full, job_id)
    stages = list(control.reload(full.config))
    assert stages[-1]["stage"] == "ready"
    assert [running["job"] for running in stages[-1]["waiting"]] == [job_id]
    assert full.pid("zygote") != zygote
    assert "space in" in wait_for_waiting(full, job_id)
    make_room(full.home.runs)
    for one in (job_id, following):
        ended = full.wait(one)
        assert (ended["status"], ended["execution"]) == ("finished", 1)
        assert steps(full, one) == list(range(1, LONG + 1))


@pytest.mark.parametrize("how", ["cancel", pytest.param("kill", marks=SHORT)])
def test_a_waiting_job_can_be_stopped(full: Daemon, how: str):
    job_id = hold_and_fill(full)
    getattr(full.client.jobs, how)(job_id)
    assert full.wait(job_id)["status"] == "stopped"
    assert full.streamed(job_id)[-1]["type"] == "stopped"
    make_room(full.home.runs)
    following = full.submit()
    assert full.wait(following)["status"] == "finished"


@SHORT
def test_a_waiting_job_can_be_paused_and_continues(full: Daemon):
    job_id = hold_and_fill(full)
    full.client.jobs.pause(job_id, release=True)
    wait_until(lambda: job(full, job_id)["status"] == "scheduled")
    assert full.streamed(job_id)[-1]["type"] == "paused"
    full.client.jobs.unpause(job_id)
    wait_for_waiting(full, job_id)
    make_room(full.home.runs)
    assert full.wait(job_id)["status"] == "finished"
    assert steps(full, job_id) == list(range(1, LONG + 1))
    check_events(full, job_id)


@SHORT
def test_the_daemon_stops_while_a_job_waits_and_resumes_it(full: Daemon):
    job_id = hold_and_fill(full)
    full.stop()
    make_room(full.home.runs)
    full.start()
    ended = full.wait(job_id)
    assert (ended["status"], ended["execution"]) == ("finished", 2)
    assert steps(full, job_id) == list(range(1, LONG + 1))


def test_waiting_counts_neither_as_a_stall_nor_for_the_time_limit(full: Daemon):
    job_id = hold_and_fill(full, timeout_s=8.0, on_stall="stop")
    holds_for(9.0, lambda: job(full, job_id)["status"] == "started")
    make_room(full.home.runs)
    assert full.wait(job_id)["status"] == "finished"
    assert full.events(job_id, "stall") == []


@SHORT
def test_a_job_that_needs_checkpoints_trains_no_step_without_one(full: Daemon):
    job_id = hold(full, samples=LONG, on_save_error="stop")
    fill(full.home.runs, leave_bytes=20_000)  # the events have room
    let_go(full)
    wait_for_waiting(full, job_id)
    reached = len(steps(full, job_id))
    assert reached < LONG
    holds_for(0.5, lambda: len(steps(full, job_id)) == reached)
    make_room(full.home.runs)
    assert full.wait(job_id)["status"] == "finished"
    assert len(full.events(job_id, "save_failed")) == 1


@pytest.fixture(scope="module")
def daemon_of_small_home(daemons: MakeDaemon) -> Iterator[Daemon]:
    daemon = daemons()
    yield from on_small_disk(daemon, daemon.home.path, "12m")


@pytest.fixture
def cramped(daemon_of_small_home: Daemon) -> Iterator[Daemon]:
    """A daemon whose whole home is on a disk of twelve megabytes: runs, Redis, logs, state."""
    yield from emptied(daemon_of_small_home, daemon_of_small_home.home.path)


def test_a_home_that_is_full_loses_no_job(cramped: Daemon):
    home = cramped.home
    undisturbed = cramped.submit(samples=LONG, save_every=1)
    assert cramped.wait(undisturbed)["status"] == "finished"
    job_id = hold(cramped, samples=LONG, retries=1)
    following = [cramped.submit(samples=LONG, save_every=1, retries=1) for _ in range(2)]
    supervisor, guardian = cramped.processes()[1], cramped.processes()[0]
    fill(home.path)
    let_go(cramped)
    wait_until(lambda: home.full_folder() is not None)
    holds_for(6.0, lambda: supervisor.is_running() and guardian.is_running())
    done = warmd("submit", "grpo", "--model", "tiny", "--samples", "2", home=home.path)
    assert done.code
    assert done.err.count("\n") == 1
    make_room(home.path)
    for one in (job_id, *following):
        ended = cramped.wait(one, timeout_s=120)
        assert (ended["status"], ended["retries_left"]) == ("finished", 1), ended["error"]
        assert weights(cramped, one) == weights(cramped, undisturbed)
        check_events(cramped, one)


@pytest.mark.parametrize(
    "victim", ["zygote", *(pytest.param(one, marks=SHORT) for one in ("worker", "supervisor"))]
)
def test_a_process_that_dies_while_the_home_is_full_is_replaced(cramped: Daemon, victim: str):
    job_id = hold(cramped, samples=LONG, retries=1)
    waiting = cramped.submit(samples=2)
    guardian = cramped.processes()[0]
    fill(cramped.home.path)
    cramped.kill(victim)
    let_go(cramped)
    holds_for(6.0, guardian.is_running)
    make_room(cramped.home.path)
    for one in (job_id, waiting):
        ended = cramped.wait(one, timeout_s=120)
        assert (ended["status"], ended["retries_left"]) == ("finished", 1 if one == job_id else 0)
    assert steps(cramped, job_id) == list(range(1, LONG + 1))


@SHORT
def test_a_reload_on_a_full_home_ends_when_there_is_space(cramped: Daemon):
    job_id = hold(cramped, samples=LONG)
    fill(cramped.home.path)
    with ThreadPoolExecutor(1) as pool:
        reloaded = pool.submit(lambda: list(control.reload(cramped.config))[-1]["stage"])
        let_go(cramped)
        holds_for(2.0, lambda: cramped.home.is_locked())
        make_room(cramped.home.path)
        assert reloaded.result(timeout=60) == "ready"
    assert cramped.wait(job_id, timeout_s=120)["status"] == "finished"
    assert steps(cramped, job_id) == list(range(1, LONG + 1))


def test_a_daemon_stops_on_a_full_home(cramped: Daemon):
    job_id = hold(cramped, samples=LONG)
    fill(cramped.home.path)
    let_go(cramped)
    cramped.stop()
    make_room(cramped.home.path)
    cramped.start()
    assert cramped.wait(job_id, timeout_s=120)["status"] == "finished"
    assert steps(cramped, job_id) == list(range(1, LONG + 1))


def test_commands_show_what_a_job_waits_for(full: Daemon):
    job_id = hold_and_fill(full)
    place = f"space in {full.home.runs / job_id}"
    assert place in warmd("queue", home=full.home.path).out
    assert place in warmd("show", job_id, home=full.home.path).out
    make_room(full.home.runs)
    assert full.wait(job_id)["status"] == "finished"
