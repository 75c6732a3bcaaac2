"""Jobs that Redis has lost are adopted from their run directories, as they were."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from daemons import Daemon
from desks import Desk
from shell import warmd
from waiting import wait_until

from warmd.daemon.lifecycle.adopt import standing
from warmd.daemon.lifecycle.recover import Adopter, Adoption, has_lost, latest
from warmd.daemon.queue import keys
from warmd.daemon.queue.nodes import NodeRecord, NodeRegistry
from warmd.daemon.runs import asked
from warmd.daemon.runs.rundir import RunDir


def adopt(desk: Desk, *, repairs: list[str] | None = None, is_shared: bool = False) -> Adoption:
    adopter = Adopter(desk.client.places, is_shared=is_shared)
    later = 61.0 if is_shared else 0.0
    return adopter.run(begun_at=time.time() + later, repairs=repairs or [])


def lose_all(desk: Desk) -> None:
    desk.client.connection.flushall()


@contextmanager
def losing_what_follows(desk: Desk) -> Iterator[None]:
    """Redis is afterwards as it was before, as if its latest writes were cut off."""
    connection = desk.client.connection
    before: dict[bytes, Any] = {key: connection.dump(key) for key in connection.scan_iter()}
    yield
    connection.flushall()
    for key, value in before.items():
        connection.restore(key, 0, value)


def states(desk: Desk) -> dict[str, tuple[str, bool]]:
    return {row["id"]: (row["status"], row["paused"]) for row in desk.rows("jobs")}


def queue_of(desk: Desk) -> list[str]:
    return [keys.text(job) for job in desk.client.connection.lrange("rq:queue:train", 0, -1)]


def spoil(desk: Desk, job_id: str, **changes: Any) -> None:
    """Change spec.json as an earlier version would have written it."""
    path = desk.home.runs / job_id / "spec.json"
    document = orjson.loads(path.read_bytes())
    document.pop("digest")
    for name, value in changes.items():
        if value is None:
            document.pop(name)
        else:
            document[name] = value
    path.write_bytes(orjson.dumps(document))


def test_waiting_jobs_are_queued_in_their_order_with_what_was_asked(desk: Desk):
    first = desk.submit("--name", "a", "--tag", "t", "--retries", "3", "--timeout", "5m")
    second = desk.submit()
    front = desk.submit("--front")
    at = (datetime.now().astimezone() + timedelta(hours=2)).isoformat()
    scheduled = desk.submit("--at", at)
    dependent = desk.submit("--after", first)
    needy = desk.submit("--needs", "gpu=a100")
    wanted = {row["id"]: row for row in desk.rows("jobs")}
    order = queue_of(desk)
    assert order == [front, first, second, needy]
    lose_all(desk)
    found = adopt(desk)
    assert sorted(found.adopted) == sorted(wanted)
    assert not found.missing
    assert queue_of(desk) == order
    now = {row["id"]: row for row in desk.rows("jobs")}
    changing = ("created_at", "enqueued_at", "started_at")
    for job_id in wanted:
        same = {key: value for key, value in wanted[job_id].items() if key not in changing}
        assert {key: now[job_id][key] for key in same} == same
        assert abs(now[job_id]["created_at"] - wanted[job_id]["created_at"]) <= 1.5
    assert now[scheduled]["scheduled_at"] == wanted[scheduled]["scheduled_at"]
    assert now[dependent]["status"] == "deferred"
    assert now[needy]["needs"] == {"gpu": "a100"}
    job = desk.client.places.fetch(first)
    assert job.timeout == 300
    assert desk.client.store.retries_left(job) == 3
    desk.begin()
    run = desk.begin()
    assert run.id == first
    run.finish({"steps": 4})
    assert dependent in queue_of(desk)


def test_moved_jobs_keep_their_places(desk: Desk):
    first, second, third, fourth = (desk.submit() for _ in range(4))
    front = desk.submit("--front")
    for job_id, position in ((fourth, 2), (first, 4), (front, 5)):
        assert desk.client.jobs.move(job_id, position) == position
    wanted = [fourth, second, first, third, front]
    assert queue_of(desk) == wanted
    lose_all(desk)
    assert adopt(desk).missing == {}
    assert queue_of(desk) == wanted


def test_jobs_that_are_queued_after_a_move_have_their_own_places(desk: Desk):
    first, second, third = (desk.submit() for _ in range(3))
    assert desk.client.jobs.move(third, 1) == 1
    last, front = desk.submit(), desk.submit("--front")
    assert desk.warmd("pause", second).code == 0
    assert desk.warmd("resume", second).code == 0
    wanted = [second, front, third, first, last]
    assert queue_of(desk) == wanted
    lose_all(desk)
    adopt(desk)
    assert queue_of(desk) == wanted


def test_a_job_submitted_by_http_or_bench_is_adopted_as_such(desk: Desk):
    job_id = desk.submit()
    copy = desk.client.jobs.submit_again(job_id, stop_at=1)
    lose_all(desk)
    assert sorted(adopt(desk).adopted) == sorted([job_id, copy])
    assert queue_of(desk) == [copy, job_id]
    assert desk.client.find(None) == job_id


def test_running_jobs_are_queued_before_all_others(desk: Desk):
    ids = [desk.submit() for _ in range(3)]
    runs = [desk.begin(), desk.begin()]
    runs[0].step(1)
    front = desk.submit("--front")
    lose_all(desk)
    found = adopt(desk)
    assert sorted(found.adopted) == sorted([*ids, front])
    assert queue_of(desk) == [ids[0], ids[1], front, ids[2]]
    again = desk.begin()
    assert again.id == ids[0]
    assert desk.client.store.num_executions(ids[0]) == 2


def test_paused_jobs_stay_paused_and_canceled_and_ended_ones_ended(desk: Desk):
    finished, failed, stopped, held, canceled, parked, back = (desk.submit() for _ in range(7))
    run = desk.begin()
    desk.client.rundir(finished).write_result({"steps": 4}, revision=1)
    run.finish({"steps": 4})
    desk.begin().fail("no reason")
    desk.begin().stop()
    desk.begin()
    desk.warmd("pause", held)
    desk.warmd("cancel", canceled)
    desk.warmd("pause", parked)
    desk.warmd("pause", back)
    desk.warmd("resume", back)
    dependent = desk.submit("--after", failed)
    wanted = {
        **{finished: ("finished", False), failed: ("failed", False)},
        **{stopped: ("stopped", False), canceled: ("canceled", False)},
        **{held: ("scheduled", True), parked: ("scheduled", True)},
        **{back: ("queued", False), dependent: ("deferred", False)},
    }
    lose_all(desk)
    found = adopt(desk)
    assert states(desk) == wanted
    assert sorted(found.ended) == sorted([finished, failed, stopped, canceled])
    assert desk.rows("result", finished) == [{"steps": 4}]
    assert desk.warmd("resume", parked).out == f"{parked} queued\n"
    assert desk.warmd("resume", failed).out == f"{failed} queued\n"
    assert states(desk)[failed] == ("queued", False)


def test_a_job_canceled_while_it_ran_is_not_run_again(desk: Desk):
    job_id = desk.submit()
    desk.begin()
    desk.warmd("cancel", job_id)
    lose_all(desk)
    assert adopt(desk).ended == [job_id]
    assert states(desk) == {job_id: ("stopped", False)}


def test_a_resumed_job_is_queued_again_even_if_it_was_paused_then(desk: Desk):
    resumed, paused, again = (desk.submit() for _ in range(3))
    for job_id in (resumed, paused, again):
        desk.begin().fail("no reason")
        desk.warmd("resume", job_id)
    desk.warmd("pause", paused)
    desk.warmd("pause", again)
    desk.warmd("resume", again)
    lose_all(desk)
    adopt(desk)
    assert states(desk) == {
        resumed: ("queued", False),
        paused: ("scheduled", True),
        again: ("queued", False),
    }


def test_retries_that_are_left_stay_so(desk: Desk):
    job_id = desk.submit("--retries", "3")
    run = desk.begin()
    run.log.emit("requeued", reason="failed, will be tried again", retries_left=2)
    lose_all(desk)
    adopt(desk)
    assert desk.rows("show", job_id)[0]["retries_left"] == 2


LOST: dict[str, tuple[Callable[[Desk, str], Any], tuple[str, bool], bool]] = {
    "canceled": (lambda desk, job: desk.warmd("cancel", job), ("canceled", False), True),
    "paused": (lambda desk, job: desk.warmd("pause", job), ("scheduled", True), True),
    "failed": (lambda desk, job: desk.begin().fail("no"), ("failed", False), True),
    "stopped": (lambda desk, job: desk.begin().stop(), ("stopped", False), True),
    "begun": (lambda desk, job: desk.begin().step(1), ("queued", False), False),
}


@pytest.mark.parametrize("what", LOST)
def test_a_change_that_redis_has_lost_is_made_again(desk: Desk, what: str):
    act, state, is_corrected = LOST[what]
    job_id = desk.submit()
    with losing_what_follows(desk):
        act(desk, job_id)
    assert states(desk)[job_id] == ("queued", False)
    found = adopt(desk)
    assert states(desk)[job_id] == state
    assert found.corrected == ([job_id] if is_corrected else [])
    assert desk.client.store.num_executions(job_id) == asked.executions(
        RunDir(desk.home.runs / job_id)
    ) or what in ("canceled", "paused")
    assert not adopt(desk).describe()


def test_a_resume_that_redis_has_lost_is_made_again(desk: Desk):
    job_id = desk.submit()
    desk.begin().fail("no reason")
    with losing_what_follows(desk):
        desk.warmd("resume", job_id)
    assert states(desk) == {job_id: ("failed", False)}
    assert adopt(desk).corrected == [job_id]
    assert states(desk) == {job_id: ("queued", False)}


@pytest.mark.parametrize("end", ["finished", "stopped"])
def test_a_resume_whose_end_redis_has_lost_too_is_recorded_as_ended(desk: Desk, end: str):
    job_id = desk.submit()
    desk.begin().fail("no reason")
    with losing_what_follows(desk):
        desk.warmd("resume", job_id)
        run = desk.begin(execution=2)
        if end == "finished":
            desk.client.rundir(job_id).write_result({"steps": 4}, revision=1)
            run.finish({"steps": 4})
        else:
            run.stop()
    assert states(desk) == {job_id: ("failed", False)}
    assert adopt(desk).corrected == [job_id]
    # A worker takes the result from the run directory.
    assert states(desk) == {job_id: ("queued" if end == "finished" else end, False)}
    assert desk.client.store.num_executions(job_id) == 2
    assert not adopt(desk).describe()


def test_an_unpause_that_redis_has_lost_leaves_the_job_paused(desk: Desk):
    job_id = desk.submit()
    desk.warmd("pause", job_id)
    with losing_what_follows(desk):
        desk.warmd("resume", job_id)
    assert not adopt(desk).corrected
    assert states(desk) == {job_id: ("scheduled", True)}


def test_a_queue_that_lost_nothing_is_left_alone(desk: Desk):
    jobs = [desk.submit() for _ in range(4)]
    desk.begin().fail("no reason")
    desk.warmd("resume", jobs[0])
    desk.warmd("pause", jobs[1])
    desk.warmd("resume", jobs[1])
    desk.warmd("cancel", jobs[2])
    desk.warmd("resume", jobs[2])
    desk.warmd("pause", jobs[3])
    before = states(desk), queue_of(desk)
    assert not adopt(desk, repairs=["a"]).describe()
    assert (states(desk), queue_of(desk)) == before


def test_a_resumed_job_that_has_ended_since_is_not_run_again(desk: Desk):
    job_id = desk.submit()
    desk.begin().fail("no reason")
    desk.warmd("resume", job_id)
    run = desk.begin()
    desk.client.store.fail(run.job, run.execution, "no space for the event")
    assert not adopt(desk).describe()
    assert states(desk) == {job_id: ("failed", False)}


def test_jobs_of_another_home_or_redis_are_not_adopted(desk: Desk, tmp_path: Path):
    (tmp_path / "other").mkdir()
    other = Desk(tmp_path / "other")
    try:
        job_id = desk.submit()
        shutil.copytree(desk.home.runs / job_id, other.home.runs / job_id)
        assert not adopt(other).describe()
        assert [row["status"] for row in other.rows("jobs")] == ["unregistered"]
        # Once it was resumed here it is one of this home.
        assert other.warmd("resume", job_id).out == f"{job_id} queued\n"
        lose_all(other)
        assert adopt(other).adopted == [job_id]
        document = other.client.rundir(job_id).read_spec()["queueing"]
        spoil(other, job_id, queueing={**document, "redis": "elsewhere:6379/0"})
        lose_all(other)
        assert not adopt(other).describe()
    finally:
        other.close()


def test_a_job_that_starts_from_weights_is_adopted_with_them(desk: Desk):
    branch = desk.submit_branch(desk.train())
    model_of = desk.client.rundir(branch).read_spec()["model"]
    lose_all(desk)
    assert adopt(desk).adopted == [branch]
    assert desk.client.rundir(branch).read_spec()["model"] == model_of
    # Killed before the weights were there, it was not accepted, and is not queued.
    spoil(desk, branch, queueing=None)
    lose_all(desk)
    assert not adopt(desk).adopted


def test_a_home_is_the_same_by_whatever_path(desk: Desk, tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to(desk.home.path)
    done = warmd(*desk.grpo, home=link)
    assert done.code == 0, done.err
    lose_all(desk)
    assert adopt(desk).adopted == [done.out.strip()]


def test_a_moved_home_adopts_its_jobs(desk: Desk, tmp_path: Path):
    job_id = desk.submit()
    (tmp_path / "new").mkdir()
    moved = Desk(tmp_path / "new")
    try:
        for name in ("runs", "id"):
            target = moved.home.path / name
            if target.is_dir():
                shutil.rmtree(target)
            source = desk.home.path / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        assert adopt(moved).adopted == [job_id]
    finally:
        moved.close()


def test_jobs_of_earlier_versions_are_adopted_after_a_repair_if_they_had_begun(desk: Desk):
    waiting, begun, paused, failed = (desk.submit() for _ in range(4))
    assert desk.client.connection.lpop("rq:queue:train") == waiting.encode()
    desk.begin().step(1)
    run = desk.begin()
    run.log.emit("paused", step=1, released=True)
    desk.begin().fail("no reason")
    for job_id in (waiting, begun, paused, failed):
        spoil(desk, job_id, queueing=None)
    lose_all(desk)
    assert not adopt(desk).describe()
    assert {row["status"] for row in desk.rows("jobs")} == {"unregistered"}
    assert has_lost(desk.home, ["a copy"])
    found = adopt(desk, repairs=["a copy"])
    assert not has_lost(desk.home, ["a copy"])
    assert has_lost(desk.home, ["a copy", "another"])
    assert sorted(found.adopted) == sorted([begun, paused])
    assert found.ended == [failed]
    assert list(found.missing) == [waiting]
    assert "earlier version" in found.missing[waiting]
    assert states(desk) == {
        waiting: ("unregistered", False),
        begun: ("queued", False),
        paused: ("scheduled", True),
        failed: ("failed", False),
    }
    assert not adopt(desk, repairs=["a copy"]).describe()  # once per repair
    recorded = latest(desk.home)
    assert recorded is not None
    assert recorded.adopted == found.adopted


@pytest.mark.slow
def test_a_node_of_a_shared_redis_adopts_no_job_that_another_node_runs(desk: Desk):
    here, there, locked = (desk.submit() for _ in range(3))
    lose_all(desk)
    record = NodeRecord(
        machine="m", version="1", schema=1, labels={}, queues={"train": 1}, pid=1, home="/h",
        state="ready", jobs=[there], jobs_taken=1,
    )  # fmt: skip
    NodeRegistry(desk.client.connection).beat("other", record)
    lock = RunDir(desk.home.runs / locked).lock()
    found = adopt(desk, is_shared=True)
    assert found.adopted == [here]
    assert "node other runs it" in found.missing[there]
    assert "is running in another daemon" in found.missing[locked]
    assert queue_of(desk) == [here]
    os.close(lock)
    again = Adopter(desk.client.places, is_shared=True)
    more = again.run(begun_at=time.time() + 1, repairs=[], earlier=found)
    assert more.adopted == [here, locked]
    assert list(more.missing) == [there]


def test_a_job_that_is_being_submitted_is_left_to_its_client(desk: Desk):
    job_id = desk.submit()
    lose_all(desk)
    adopter = Adopter(desk.client.places, is_shared=False)
    assert not adopter.run(begun_at=time.time() - 60, repairs=[]).describe()
    shared = Adopter(desk.client.places, is_shared=True)
    found = shared.run(begun_at=time.time() + 1, repairs=[])
    assert "submitted just now" in found.missing[job_id]
    assert shared.run(begun_at=time.time() + 1, repairs=[], earlier=found).adopted == [job_id]
    lose_all(desk)
    assert adopter.run(begun_at=time.time() + 1, repairs=[]).adopted == [job_id]


def test_a_damaged_run_directory_is_named_and_does_not_keep_the_others(desk: Desk):
    damaged, whole, gone = (desk.submit() for _ in range(3))
    (desk.home.runs / damaged / "spec.json").write_bytes(b"{")
    model = Path(desk.client.rundir(gone).read_spec()["model"]["path"])
    lose_all(desk)
    found = adopt(desk, repairs=["a"])
    assert found.adopted == [whole, gone]
    assert "cannot be read" in found.missing[damaged]
    assert model.is_dir()


def test_a_request_is_recorded_also_where_the_disk_is_full_or_not_at_all(desk: Desk):
    job_id = desk.submit()
    rundir = RunDir(desk.home.runs / job_id)
    asked.note(rundir, asked.PAUSED)
    (rundir.path / ".queue.json.tmp").mkdir()  # no file can be written
    asked.note(rundir, asked.CONTINUED)
    assert asked.read(rundir) is None
    (rundir.path / ".queue.json.tmp").rmdir()
    asked.note(rundir, asked.CANCELED)
    (rundir.path / asked.NAME).write_bytes((rundir.path / asked.NAME).read_bytes()[:-9])
    assert asked.read(rundir) is None
    asked.note(RunDir(desk.home.runs / "grpo-20261121-184200-aaaa"), asked.PAUSED)
    assert not (desk.home.runs / "grpo-20261121-184200-aaaa").exists()
    assert standing(rundir).ended is None


@pytest.mark.slow
@pytest.mark.nightly(
    part="homes", catches="a job that ends otherwise once its queue is lost with the power"
)
def test_after_a_power_loss_that_took_the_queue_all_jobs_end_as_they_would_have(daemon: Daemon):
    twin = daemon.submit("behaviours:paced")
    running = daemon.submit("behaviours:paced", samples=12)
    alone = daemon.submit("behaviours:paced", samples=12, after=running)
    waiting, parked, canceled = (daemon.submit() for _ in range(3))
    daemon.client.jobs.pause(parked)
    daemon.client.jobs.cancel(canceled)
    daemon.wait(twin)
    wait_until(lambda: len(daemon.events(running, "step")) > 3)
    daemon.kill_everything()
    daemon.damage_redis()
    progress = [one for one in daemon.start() if one["stage"] == "recovery"]
    assert [one["name"] for one in progress] == ["redis", "jobs", "jobs"]
    assert "neither a snapshot nor a command" in progress[0]["note"]
    ids = ", ".join((alone, waiting, parked, running))
    assert progress[1]["note"] == f"4 jobs adopted from run directories: {ids}"
    assert progress[2]["note"] == f"2 jobs recorded as ended: {twin}, {canceled}"
    for job_id in (running, waiting, alone):
        assert daemon.wait(job_id)["status"] == "finished"
    jobs = daemon.client.jobs.several([twin, parked, canceled])
    assert [job["status"] for job in jobs] == ["finished", "scheduled", "canceled"]
    assert daemon.client.jobs.get(running)["execution"] == 2
    model = "model/model.safetensors"
    weights = [daemon.client.rundir(job).path / model for job in (running, alone)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    started = [daemon.events(job_id, "started")[-1]["time"] for job_id in (running, waiting)]
    assert started == sorted(started)
    done = warmd("doctor", home=daemon.home.path)
    assert "neither a snapshot nor a command" in done.out
    assert progress[1]["note"] in done.out
    daemon.client.jobs.unpause(parked)
    assert daemon.wait(parked)["status"] == "finished"
