"""A worker with a server and no daemon: the test plays the zygote, and decides what horses do."""

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

import orjson
import psutil
from waiting import wait_until

from warmd.configs.config import DaemonConfig
from warmd.daemon.client.client import Client
from warmd.daemon.host.channel import Channel, listen
from warmd.daemon.host.home import Home
from warmd.daemon.queue import keys
from warmd.daemon.queue.workers import Roster
from warmd.daemon.supervise.redis_server import EmbeddedServer, find_binary
from warmd.jobs import spec_class

NAME = "infer-0:abcd1234:1"


class Workplace:
    """A home with a server of its own."""

    def __init__(self, folder: Path) -> None:
        self.config = DaemonConfig(home=folder / "home", http_port=None)
        self.home = Home(self.config.home)
        self.home.create()
        self.server = EmbeddedServer(self.home, find_binary(None))
        self.server.start()
        self.client = Client(self.config)
        self.store = self.client.store
        self.connection = self.client.connection
        self.roster = Roster(self.store)
        self._workers: list[subprocess.Popen[bytes]] = []

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()
        self.wake_server()
        self.client.close()
        self.server.stop()

    def submit(self, *, model: str | None = None, **how: Any) -> str:
        """Queue a prompt, by default for the built-in model."""
        values = {"prompt": "a", **({"model": model} if model is not None else {})}
        return self.client.submit(spec_class("infer").parse(values), **how)

    def status(self, job_id: str) -> str:
        status: str = self.client.job(job_id)["status"]
        return status

    def events(self, job_id: str, type: str) -> list[dict[str, Any]]:
        from warmd.daemon.runs import events

        found = events.read(self.client.rundir(job_id).events)
        return [event for event in found if event["type"] == type]

    def suspend_server(self) -> None:
        """Have it hang: it accepts connections and commands, and answers none."""
        assert self.server.process is not None
        self.server.process.send_signal(signal.SIGSTOP)

    def wake_server(self) -> None:
        assert self.server.process is not None
        self.server.process.send_signal(signal.SIGCONT)

    def worker(
        self, *, slots: int = 4, is_shared: bool = False, lease_s: float = 15.0, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start a worker of the queue infer and wait until it listens."""
        config = {"name": "infer-0", "queue": "infer", "isolation": "resident", "slots": slots}
        settings = {
            "url": self.server.url,
            "name": NAME,
            "config": config if slots > 1 else {**config, "isolation": "fork"},
            "is_shared": is_shared,
            "lease_s": lease_s,
        }
        with open(self.home.log, "ab") as log:
            worker = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "warmd.daemon.work.worker",
                    str(self.home.path),
                    str(os.getpid()),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, **environment},
            )
        self._workers.append(worker)
        assert worker.stdin is not None
        with worker.stdin as stdin:
            stdin.write(orjson.dumps(settings))
        wait_until(lambda: b"listening" in self.home.log.read_bytes())
        return worker

    @contextmanager
    def zygote(self) -> Iterator[Zygote]:
        """Be the zygote that the workers ask for horses."""
        with contextlib.closing(Zygote(self.home)) as zygote:
            yield zygote


class Zygote:
    """Gives out horses that are processes which sleep; the test speaks for them."""

    def __init__(self, home: Home) -> None:
        self._listener = listen(home.zygote_socket)
        self._listener.settimeout(20)
        self._horses: list[PlayedHorse] = []

    def fork(self) -> PlayedHorse:
        """Answer the next request for a horse."""
        connection, _ = self._listener.accept()
        connection.settimeout(20)
        self._horses.append(PlayedHorse(Channel(connection)))
        return self._horses[-1]

    def close(self) -> None:
        self._listener.close()
        for horse in self._horses:
            horse.close()


class PlayedHorse:
    """One that was asked for, and lives."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.request = next(iter(channel))
        self.job_id: str = self.request["job_id"]
        self._process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.pid = self._process.pid
        channel.send({"pid": self.pid})

    def next_order(self) -> dict[str, Any]:
        """Wait for what its worker has to say."""
        return next(iter(self.channel))

    def end(self, job_id: str, **outcome: Any) -> None:
        """Have the last word on a job."""
        self.channel.send({"job": job_id, **outcome})

    def lives(self) -> bool:
        return self._process.poll() is None

    def die(self) -> None:
        """Close the line, as the kernel and the zygote do for a horse that has ended."""
        self.channel.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self.channel.close()


@contextmanager
def workplace() -> Iterator[Workplace]:
    """A workplace in a folder whose name leaves room for the sockets' own."""
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
    """The processes below another one."""
    return psutil.Process(pid).children(recursive=True)


__all__ = ["NAME", "Workplace", "Zygote", "children_of", "keys", "seconds_until", "workplace"]
