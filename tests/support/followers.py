"""A training job whose events the test writes, and those who follow them over HTTP."""

from __future__ import annotations

import threading

import httpx2 as httpx
from gateways import Execution, Gateway

from warmd.configs.queues import TRAIN
from warmd.daemon.lifecycle.follow import Publisher
from warmd.daemon.lifecycle.statuses import ENDED
from warmd.daemon.queue import keys
from warmd.daemon.queue.stream import StreamWriter
from warmd.daemon.runs.events import EventLog
from warmd.jobs import spec_class


class Training:
    """A queued training job, whose events the test writes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        spec = spec_class("grpo").parse({"model": "tiny", "samples": 1})
        self.id = gateway.client.jobs.submit(spec)
        self._path = gateway.client.rundir(self.id).events
        self._writer = StreamWriter(gateway.client.connection)
        self._publisher = Publisher(self._writer, self.id, self._path)
        self._followers: list[Follower] = []
        self._execution = 1
        self.seq = 0

    def follow(self, *, after: int = 0, reads: bool = True) -> Follower:
        url = f"{self._gateway.url}/v1/warmd/jobs/{self.id}/events/stream?after={after}"
        self._followers.append(Follower(url, reads=reads))
        return self._followers[-1]

    def log(self, number: int, *, note: str = "") -> None:
        """Append events to the file and to the stream."""
        publish = self._publisher.publish
        with EventLog(self._path, execution=self._execution, publish=publish) as events:
            for _ in range(number):
                self.seq += 1
                events.emit("note", number=self.seq, note=note)
        self._writer.flush()

    def log_in_stream_only(self) -> None:
        """Publish an event as a worker does while the disk is full."""
        self.seq += 1
        event = {"seq": self.seq, "execution": 1, "time": 1.0, "type": "note", "step": None}
        self._publisher.publish_unwritten({**event, "number": self.seq})
        self._writer.flush()

    def begin(self) -> Execution:
        """Start an execution, whose first event is `started`."""
        execution = self._gateway.take(TRAIN)
        assert execution.job.id == self.id
        self._execution = execution.started.number
        self.seq += 1
        return execution

    def finish(self, execution: Execution) -> None:
        """Log `finished`, and finish the job."""
        execution.finish()
        self.seq += 1

    def resume(self) -> None:
        """Queue the ended job again."""
        store = self._gateway.client.store
        job = store.fetch(self.id)
        assert job is not None
        assert store.enqueue_again(job)

    def trim(self) -> None:
        """Drop all but the newest event from the stream."""
        self._gateway.client.connection.xtrim(keys.events(self.id), maxlen=1, approximate=False)

    def end(self) -> None:
        if self._gateway.status(self.id) not in ENDED:
            self._gateway.client.jobs.cancel(self.id)
        for follower in self._followers:
            follower.may_read.set()
            follower.ended()


class Follower:
    """A stream of the job's events, read in a thread of its own."""

    def __init__(self, url: str, *, reads: bool) -> None:
        self._url = url
        self.ids: list[int] = []
        self.may_read = threading.Event()
        if reads:
            self.may_read.set()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with httpx.stream("GET", self._url, timeout=60) as answer:
            for line in answer.iter_lines():
                self.may_read.wait(60)
                if line.startswith("id: "):
                    self.ids.append(int(line.removeprefix("id: ")))

    def ended(self) -> list[int]:
        """Wait for the end of the stream, and return the ids of its events."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.ids
