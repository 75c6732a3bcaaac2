"""The streams of events: copied by the worker, many at once, and whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from waiting import wait_until

from warmd.daemon.host.home import Home
from warmd.daemon.lifecycle.follow import Publisher, follow
from warmd.daemon.queue import keys, stream
from warmd.daemon.queue.stream import StreamWriter
from warmd.daemon.runs.events import EventLog
from warmd.daemon.supervise.redis_server import EmbeddedRedis, find_binary


@pytest.fixture
def server(tmp_path: Path) -> Iterator[redis.Redis]:
    home = Home(tmp_path / "home")
    home.create()
    server = EmbeddedRedis(home, find_binary(None))
    server.start()
    with keys.connect(server.url) as connection:
        yield connection
    server.stop()


def seqs(server: redis.Redis, job_id: str) -> list[int]:
    """The numbers of the events in a job's stream."""
    entries: Any = server.xrange(keys.events(job_id))
    return [int(entry[0].split(b"-")[0]) for entry in entries]


def test_a_reader_of_many_streams_wakes_once_for_simultaneous_events(
    server: redis.Redis, tmp_path: Path
):
    writer, jobs = StreamWriter(server), [f"job-{number}" for number in range(16)]
    for job in jobs:
        Publisher(writer, job, tmp_path / job).publish({"seq": 1, "type": "text"})
    heard: list[Any] = []

    def wait() -> None:
        with keys.connect(
            "unix://" + server.connection_pool.connection_kwargs["path"]
        ) as connection:
            heard.append(connection.xread({keys.events(job): "0" for job in jobs}, block=10_000))

    reader = threading.Thread(target=wait)
    reader.start()
    wait_until(lambda: server.info("clients")["blocked_clients"] == 1)
    writer.flush()
    reader.join()
    assert len(heard[0]) == len(jobs)


def test_events_that_a_killed_horse_did_not_send_are_read_from_the_file(
    server: redis.Redis, tmp_path: Path
):
    writer, path = StreamWriter(server), tmp_path / "events.jsonl"
    publisher = Publisher(writer, "job", path)
    with EventLog(path, execution=1) as log:
        log.emit("started")
        publisher.publish({"seq": 1, "type": "started"})
        log.emit("text", text="never sent")
        log.emit("requeued")
        publisher.publish({"seq": 3, "type": "requeued"})
    writer.flush()
    assert seqs(server, "job") == [1, 2, 3]


@pytest.mark.parametrize("is_lost", [1, 2])
def test_events_of_a_full_disk_that_redis_has_lost_are_copied_before_the_file_has_them(
    server: redis.Redis, tmp_path: Path, is_lost: int
):
    """Redis exits on the full disk and restarts before the horse can write its events."""
    writer, path = StreamWriter(server), tmp_path / "events.jsonl"
    publisher = Publisher(writer, "job", path)
    with EventLog(path, execution=1, publish=publisher.publish) as log:
        log.emit("started")
        writer.flush()
        announced = [
            {"seq": number, "execution": 1, "time": 1.0, "type": "waiting", "step": None}
            for number in range(2, 2 + is_lost)
        ]
        writer.is_redis_down = True
        for event in announced:
            publisher.publish_unwritten(event)
            writer.flush()
        writer.is_redis_down = False
        publisher.catch_up()
        assert seqs(server, "job") == [1, *range(2, 2 + is_lost)]
        log.restore(announced)
        log.emit("waited")
    writer.flush()
    assert seqs(server, "job") == list(range(1, is_lost + 3))


def test_a_wrong_type_at_the_key_of_a_stream_does_not_block_other_streams(
    server: redis.Redis, tmp_path: Path
):
    server.set(keys.events("spoilt"), "by hand")
    writer, path = StreamWriter(server), tmp_path / "events.jsonl"
    spoilt, other = Publisher(writer, "spoilt", path), Publisher(writer, "other", path)
    with EventLog(path, execution=1, publish=spoilt.publish) as log:
        log.emit("started")
    other.publish({"seq": 1, "type": "started"})
    writer.flush()
    assert seqs(server, "other") == [1]
    server.delete(keys.events("spoilt"))
    spoilt.catch_up()
    assert seqs(server, "spoilt") == [1]


@pytest.mark.parametrize("is_in_file", [True, False])
def test_entries_with_zeros_are_not_read_and_the_stream_is_written_anew(
    server: redis.Redis, tmp_path: Path, is_in_file: bool
):
    job, path = "job-1", tmp_path / "events.jsonl"
    with EventLog(path, execution=1) as log:
        for step in range(1, 5):
            log.emit("step", step=step)
    writer = StreamWriter(server)
    Publisher(writer, job, path).catch_up()
    assert seqs(server, job) == [1, 2, 3, 4]
    lines = path.read_bytes().splitlines(keepends=True)
    written = [orjson.loads(line) for line in lines]
    server.delete(keys.events(job))
    for event in written:
        entry = orjson.dumps(event)
        if event["seq"] == 3:  # as a power failure leaves it
            entry = entry[:20] + bytes(len(entry) - 20)
        server.xadd(keys.events(job), {"event": entry}, id=f"{event['seq']}-0")
    assert [event["seq"] for event in stream.newest(server, {job: 9})[0]] == [4, 2, 1]
    if not is_in_file:
        path.write_bytes(b"".join(lines[:1]))
    found = list(follow(server, job, path, has_ended=lambda: True))
    assert found == (written if is_in_file else written[:1])
    publisher = Publisher(writer, job, path)
    ahead = publisher.ahead()
    assert (ahead.events, ahead.is_copy) == ([] if is_in_file else written[1:2], True)
    if not is_in_file:
        publisher.catch_up()
        # A worker that is killed now must find the event that only the stream has.
        assert Publisher(writer, job, path).ahead().events == written[1:2]
        path.write_bytes(b"".join(lines[:2]))
    publisher.catch_up()
    assert seqs(server, job) == ([1, 2, 3, 4] if is_in_file else [1, 2])
