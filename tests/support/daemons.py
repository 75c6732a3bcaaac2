"""A real daemon for a test: its own home, its own processes, a tiny model."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import orjson
import psutil
from waiting import wait_until

from warmd.configs.config import DaemonConfig, ModelConfig, WorkerConfig
from warmd.daemon.client import control
from warmd.daemon.client.client import Client
from warmd.daemon.host.home import Home
from warmd.daemon.lifecycle.queueing import Queueing
from warmd.daemon.lifecycle.view import JobFilter
from warmd.daemon.supervise import aof_format
from warmd.jobs import spec_class
from warmd.jobs.errors import WarmdError


def gone(process: psutil.Process) -> bool:
    """Whether it has ended; the process 1 of a container may leave it a zombie for seconds.

    A killed process is one from the end of its first thread on, and keeps its locks until the last.
    """
    try:
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() == 1
    except psutil.NoSuchProcess:
        return True


class Daemon:
    """Starts, queries and kills one daemon."""

    def __init__(self, home: Path, model: Path, **settings: Any) -> None:
        settings.setdefault("workers", (WorkerConfig(name="train-0", queue="train", threads=1),))
        settings.setdefault("http_port", None)
        self.config = DaemonConfig(
            home=home, models=(ModelConfig(name="tiny", path=str(model)),), **settings
        )
        self.home = Home(home)
        self.client = Client(self.config)
        self.folder = home.parent  # where the tests' reward functions leave their files

    def start(self) -> list[dict[str, Any]]:
        return list(control.start(self.config))

    def stop(self, *, now: bool = False) -> None:
        for _ in control.stop(self.config, now=now):
            pass

    def status(self) -> dict[str, Any]:
        return control.status(self.config)

    def pid(self, name: str) -> int:
        """The process id of supervisor, Redis, zygote, worker or horse."""
        if name == "supervisor":
            state = self.home.read_state()
            assert state is not None
            return int(state["pid"])
        status = self.status()
        if name == "worker":
            return int(status["workers"][0]["pid"])
        if name == "horse":
            return int(status["workers"][0]["horse"]["pid"])
        return int(status[name]["pid"])

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)

    def is_settled(self) -> bool:
        """Whether its models are warm and its workers there, with no horse: none is resident.

        A horse that has sent its last message and not ended yet still takes its worker's one slot.
        """
        with contextlib.suppress(WarmdError):  # the supervisor may be away for a moment
            status = self.status()
            is_warm: bool = status["zygote"]["state"] == "ready"
            return is_warm and all(w["pid"] and w["horse"] is None for w in status["workers"])
        return False

    def leave_idle(self) -> None:
        """End the jobs that run or wait, and wait until they have."""

        def is_idle() -> bool:
            with contextlib.suppress(WarmdError):  # the server may be away for a moment
                for job in (
                    jobs := self.client.jobs.all(JobFilter(statuses=("queued", "started")))
                ):
                    self.client.jobs.cancel(job["id"])
                return not jobs
            return False

        wait_until(is_idle)

    def processes(self) -> list[psutil.Process]:
        """The guardian (while it lives) and everything below it."""
        supervisor = psutil.Process(self.pid("supervisor"))
        if not any("warmd." in word for word in supervisor.cmdline()):
            return []  # a stale pid, reused by another process
        guardian = supervisor.parent()
        # Otherwise the pid belongs to another process, which must not be killed.
        is_ours = guardian is not None and guardian.cmdline()[-2:] == ["-m", "warmd.daemon"]
        own = [guardian] if guardian is not None and is_ours else []
        return [*own, supervisor, *supervisor.children(recursive=True)]

    def wake(self) -> None:
        """Continue processes that a failed test left suspended."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def kill_everything(self) -> None:
        """Kill all processes, as a power failure does."""
        doomed = self.processes()
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        wait_until(lambda: all(map(gone, doomed)), timeout_s=10)

    def damage_redis(self) -> None:
        """Make the append-only file of its Redis, which has ended, unreadable from its beginning.

        The next start begins with an empty Redis.
        """
        found = aof_format.parts_of(self.home.redis_folder)
        assert found is not None
        path = found.parts[0].path
        path.write_bytes(b"\0" + path.read_bytes()[1:])

    def submit(
        self,
        reward: str = "behaviours:length",
        *,
        folder: Path = Path(__file__).parent,  # where the daemon finds `behaviours`
        **options: Any,
    ) -> str:
        """Submit a GRPO job on the tiny model with a dataset in a folder."""
        submitting = ("name", "front", "after", "at", "retries", "timeout_s")
        how = {name: options.pop(name) for name in submitting if name in options}
        data = self.folder / "rows.jsonl"
        if not data.exists():
            rows = [{"prompt": f"{n} and {n}", "answer": str(self.folder)} for n in range(40)]
            data.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        values = {
            "model": "tiny",
            "dataset": str(data),
            "samples": 6,
            "num_generations": 2,
            "max_completion_length": 4,
            "save_every": 2,
            "reward": [reward],
            **options,
        }
        with contextlib.chdir(folder):
            return self.client.jobs.submit(spec_class("grpo").parse(values), Queueing(**how))

    def wait(self, job_id: str, *statuses: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until the job has one of the statuses (or has ended)."""
        wanted = statuses or ("finished", "failed", "stopped", "canceled")

        def reached() -> dict[str, Any] | None:
            with contextlib.suppress(WarmdError):  # the server may be away for a moment
                job = self.client.jobs.get(job_id)
                return job if job["status"] in wanted else None
            return None

        job: dict[str, Any] = wait_until(reached, timeout_s=timeout_s)
        return job

    def events(self, job_id: str, type: str | None = None) -> list[dict[str, Any]]:
        """The job's events so far, from its run directory."""
        from warmd.daemon.runs import events

        found = events.read(self.client.rundir(job_id).events)
        return [event for event in found if type is None or event["type"] == type]

    def streamed(self, job_id: str) -> list[dict[str, Any]]:
        """The job's events in Redis; the newest ones of a job that has ended."""
        from warmd.daemon.queue import keys, stream

        found: Any = self.client.connection.xrange(keys.events(job_id))
        checked = [stream.checked(entry) for entry in found]
        assert None not in checked, "damaged entries"
        return [event for event in checked if event is not None]

    def close(self) -> None:
        """End it, whatever state it is in."""
        self.client.close()
        if self.home.is_locked():
            with contextlib.suppress(psutil.NoSuchProcess):
                self.kill_everything()
