"""A worker with Redis and without a daemon: the test acts as the zygote and as its horses."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from desks import kill_redis
from waiting import wait_until

from warmd.configs.config import DaemonConfig, WorkerConfig
from warmd.daemon.client.client import Client
from warmd.daemon.host.channel import Channel, listen
from warmd.daemon.host.home import Home
from warmd.daemon.host.messages import (
    HorseStarted,
    JobOutcome,
    Message,
    RunJob,
    WorkerSettings,
    encode,
)
from warmd.daemon.lifecycle.queueing import Queueing
from warmd.daemon.queue import keys
from warmd.daemon.queue.jobs import JobStore
from warmd.daemon.queue.mailbox import Mailbox
from warmd.daemon.queue.stream import StreamWriter
from warmd.daemon.queue.workers import Lease, WorkerRegistry
from warmd.daemon.supervise.redis_server import EmbeddedRedis, find_binary
from warmd.daemon.work.gangs import GangWork
from warmd.daemon.work.held import Held
from warmd.jobs import spec_class

NAME = "infer-0:abcd1234:1"
IMPATIENT = """
from warmd.daemon.work import attempt, worker
attempt.STUCK_S = {}
worker.main()
"""


class Workplace:
    """A home with its own Redis."""

    def __init__(self, folder: Path) -> None:
        self.config = DaemonConfig(home=folder / "home", http_port=None)
        self.home = Home(self.config.home)
        self.home.create()
        self.redis = EmbeddedRedis(self.home, find_binary(None))
        self.redis.start()
        self.client = Client(self.config)
        self.store = self.client.store
        self.connection = self.client.connection
        self.registry = WorkerRegistry(self.store)
        self._workers: list[subprocess.Popen[bytes]] = []

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()
        self.client.close()
        kill_redis(self.redis)

    def submit(self, *, model: str | None = None, **how: Any) -> str:
        """Queue a prompt, by default for the built-in model."""
        values = {"prompt": "a", **({"model": model} if model is not None else {})}
        return self.client.jobs.submit(spec_class("infer").parse(values), Queueing(**how))

    def status(self, job_id: str) -> str:
        status: str = self.client.jobs.get(job_id)["status"]
        return status

    def events(self, job_id: str, type: str) -> list[dict[str, Any]]:
        from warmd.daemon.runs import events

        found = events.read(self.client.rundir(job_id).events)
        return [event for event in found if event["type"] == type]

    def suspend_redis(self) -> None:
        """Suspend Redis: it accepts connections and commands, and replies to none."""
        assert self.redis.process is not None
        self.redis.process.send_signal(signal.SIGSTOP)

    def resume_redis(self) -> None:
        assert self.redis.process is not None
        self.redis.process.send_signal(signal.SIGCONT)

    def held(
        self, store: JobStore, config: WorkerConfig, labels: dict[str, str] | None = None
    ) -> Held:
        """What a worker holds that uses a store, for its parts to be tested one by one."""
        return Held(
            home=self.home,
            config=config,
            name=NAME,
            is_shared=True,
            store=store,
            registry=WorkerRegistry(store),
            writer=StreamWriter(store.connection),
            mailbox=Mailbox(store.connection, config.queue, NAME),
            lease=Lease(self.redis.url, NAME, config.queue, length_s=15.0),
            stored=None,
            gangs=GangWork(store, NAME, "node", labels or {}, wait_s=60.0),
        )

    def worker(
        self,
        *,
        slots: int = 4,
        is_shared: bool = False,
        lease_s: float = 15.0,
        labels: dict[str, str] | None = None,
        stuck_s: float | None = None,
        **environment: str,
    ) -> subprocess.Popen[bytes]:
        """Start a worker of queue infer and wait until it listens.

        `stuck_s`: after so long it takes a horse for stuck.
        """
        isolation = "resident" if slots > 1 else "fork"
        settings = WorkerSettings(
            config=WorkerConfig(name="infer-0", queue="infer", isolation=isolation, slots=slots),
            url=self.redis.url,
            name=NAME,
            is_shared=is_shared,
            lease_s=lease_s,
            labels=labels or {},
        )
        program = ("-m", "warmd.daemon.work.worker")
        if stuck_s is not None:
            program = ("-c", IMPATIENT.format(stuck_s))
        with open(self.home.log, "ab") as log:
            worker = subprocess.Popen(
                [sys.executable, *program, str(self.home.path), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, **environment},
            )
        self._workers.append(worker)
        assert worker.stdin is not None
        with worker.stdin as stdin:
            stdin.write(encode(settings))
        wait_until(lambda: b"listening" in self.home.log.read_bytes())
        return worker

    @contextmanager
    def zygote(self) -> Iterator[FakeZygote]:
        """Act as the zygote of the workers."""
        with contextlib.closing(FakeZygote(self.home)) as zygote:
            yield zygote


class FakeZygote:
    """Provides horses that are sleeping processes; the test sends their messages."""

    def __init__(self, home: Home) -> None:
        self._listener = listen(home.zygote_socket)
        self._listener.settimeout(20)
        self._horses: list[FakeHorse] = []

    def accept(self) -> Channel:
        """Accept the next request for a horse, without forking one yet."""
        connection, _ = self._listener.accept()
        connection.settimeout(20)
        return Channel(connection)

    def fork(self) -> FakeHorse:
        """Accept the next request for a horse, and fork one."""
        self._horses.append(FakeHorse(self.accept()))
        return self._horses[-1]

    def close(self) -> None:
        self._listener.close()
        for horse in self._horses:
            horse.close()


class FakeHorse:
    """A horse that was requested and has started."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._received: list[Message] = []  # one read may return several
        request = self.next_message()
        assert isinstance(request, RunJob)
        self.request = request
        self.job_id = request.job_id
        self._process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.pid = self._process.pid
        channel.send(HorseStarted(self.pid))

    def next_message(self) -> Message:
        """Wait for the next message of its worker."""
        while not self._received:
            self._received += self.channel.receive()
            assert not self.channel.closed_by_peer
        return self._received.pop(0)

    def end(self, job_id: str, outcome: str, **fields: Any) -> None:
        """Report the outcome of a job."""
        self.channel.send(JobOutcome(job_id, outcome, **fields))

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def die(self) -> None:
        """Close the connection, as the kernel and the zygote do when a horse ends."""
        self.channel.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self.channel.close()


@contextmanager
def workplace() -> Iterator[Workplace]:
    """A workplace in a folder with a short path: socket paths are limited."""
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        place = Workplace(Path(folder))
        try:
            yield place
        finally:
            place.close()


def seconds_until(condition: Any, *, timeout_s: float = 30.0) -> float:
    """Wait for a condition and return how long that took."""
    begun = time.monotonic()
    wait_until(condition, timeout_s=timeout_s)
    return time.monotonic() - begun


def children_of(pid: int) -> list[psutil.Process]:
    """All descendants of a process."""
    return psutil.Process(pid).children(recursive=True)


__all__ = ["NAME", "FakeZygote", "Workplace", "children_of", "keys", "seconds_until", "workplace"]
