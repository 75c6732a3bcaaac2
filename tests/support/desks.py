"""A home with a Redis and no daemon: the test runs commands and acts as the worker.

It does so through the daemon's own job store and event log.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

from shell import CLEAN_ENVIRON, Done, warmd

from warmd.configs.config import load
from warmd.daemon.client.client import Client
from warmd.daemon.host.home import Home
from warmd.daemon.lifecycle.follow import Publisher
from warmd.daemon.queue.stream import StreamWriter
from warmd.daemon.runs.events import EventLog
from warmd.daemon.supervise.redis_server import EmbeddedRedis, find_binary


def kill_redis(server: EmbeddedRedis) -> None:
    """End a Redis whose data is not used any more: a stop takes a tenth of a second."""
    if server.process is not None:
        server.process.kill()
        server.process.wait()


class Desk:
    """A home with a Redis; the test runs commands and acts as the worker."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder / "home")
        self.home.create()
        self.server = EmbeddedRedis(self.home, find_binary(None))
        self.server.start()
        self.client = Client(load(home=self.home.path, environ={}))
        self.environ = {**CLEAN_ENVIRON, "WARMD_HOME": str(self.home.path)}
        self.logs = contextlib.ExitStack()
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text('{"max_position_embeddings": 256}')
        self.grpo = ("submit", "grpo", "--model", str(self.model), "--samples", "4")

    def close(self) -> None:
        self.logs.close()
        self.client.close()
        kill_redis(self.server)

    def warmd(self, *arguments: str) -> Done:
        return warmd(*arguments, home=self.home.path)

    def submit(self, *arguments: str) -> str:
        done = self.warmd(*self.grpo, *arguments)
        assert done.code == 0, done.err
        job_id: str = done.out.rstrip("\n")
        return job_id

    def train(self) -> str:
        """Submit a training and finish it, with a model; return its id."""
        job_id = self.submit()
        run = self.begin()
        rundir = self.client.rundir(job_id)
        shutil.copytree(self.model, rundir.path / "model")
        rundir.write_result({"steps": 4}, revision=1)
        run.finish({"steps": 4})
        return job_id

    def submit_branch(self, parent: str) -> str:
        """Submit a training that starts from the weights of another; return its id."""
        done = self.warmd("submit", "grpo", "--init-from", parent, "--samples", "4")
        assert done.code == 0, done.err
        return str(done.out.strip())

    def rows(self, *arguments: str) -> list[dict[str, Any]]:
        done = self.warmd(*arguments, "--json")
        assert done.code == 0, done.err
        objects: list[dict[str, Any]] = done.objects
        return objects

    def begin(self, *, execution: int = 1) -> Run:
        """Take the next job and begin its execution, with this number in its events."""
        popped: Any = self.client.connection.blpop("rq:queue:train", 5)
        return Run(self, popped[1], execution)


class Run:
    """One execution of a job, step by step."""

    def __init__(self, desk: Desk, popped: bytes, execution: int) -> None:
        self.id = job_id = popped.decode()
        self.store = desk.client.store
        taken = self.store.begin(popped, "train", "w")
        assert taken is not None
        self.job, started = taken
        self.execution = started.claim
        self.rundir = desk.client.rundir(job_id)
        path = self.rundir.events
        writer = StreamWriter(desk.client.connection)
        publisher = Publisher(writer, job_id, path)

        def publish(event: dict[str, Any]) -> None:
            publisher.publish(event)
            writer.flush()

        log = EventLog(path, execution=execution, publish=publish)
        self.log = desk.logs.enter_context(log)
        self.log.emit("started")
        self.log.emit("begin", steps_total=4)

    def step(self, number: int) -> None:
        self.log.emit("step", step=number, steps_total=4, loss=1 / number, reward=0.5)

    def finish(self, result: dict[str, Any]) -> None:
        self.rundir.write_result(result, revision=self.rundir.read_spec()["revision"])
        self.log.emit("finished", result=result)
        self.store.finish(self.job, self.execution)

    def fail(self, error: str) -> None:
        self.log.emit("failed", error=error, traceback="Traceback …")
        self.store.fail(self.job, self.execution, error)

    def stop(self) -> None:
        self.log.emit("stopped", reason="requested: cancel")
        self.store.stop(self.job, self.execution, "stopped on request")
