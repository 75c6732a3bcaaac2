"""Several nodes on one Redis: processes with homes of their own and a shared folder of runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import psutil
import redis
from ports import free_port
from waiting import wait_until

from warmd.configs.config import DaemonConfig, ModelConfig
from warmd.daemon.client.client import Client
from warmd.daemon.host.home import Home
from warmd.daemon.host.machine import node_name
from warmd.daemon.lifecycle.queueing import Queueing
from warmd.daemon.queue import keys
from warmd.daemon.queue.nodes import Node
from warmd.daemon.supervise.redis_server import find_binary
from warmd.jobs import spec_class

ROOT = Path(__file__).parents[2]


class Cluster:
    """A Redis on a loopback port, and the nodes that a test starts."""

    def __init__(self, folder: Path, model: Path, run_store: str | None = None) -> None:
        """`run_store`: its URL; then each home has run directories of its own."""
        self.run_store = run_store
        self.settings: dict[str, str] = {}  # variables of all nodes that are started from now on
        self.folder = folder
        self.model = model
        self.runs = folder / "runs"
        self.runs.mkdir(mode=0o700)
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"  # for this process
        self._redis: subprocess.Popen[bytes] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}  # the latest of each home
        self._set_up()
        self.start_redis()
        self.client = self._client()

    def _set_up(self) -> None:
        """Prepare what else it needs, before Redis starts."""

    def _redis_command(self) -> list[str]:
        return [find_binary(None), "--port", str(self.port), "--bind", "127.0.0.1"]

    def start_redis(self) -> None:
        """Start Redis, again after it was killed."""
        data = self.folder / "redis"
        data.mkdir(exist_ok=True)
        options = ["--dir", str(data), "--appendonly", "yes", "--appendfsync", "always"]
        self._redis = subprocess.Popen(
            [*self._redis_command(), *options, "--save", ""],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

        def answers() -> bool:
            with suppress(redis.RedisError), keys.connect_once(self.url) as connection:
                return bool(connection.ping())
            return False

        wait_until(answers)

    def kill_redis(self) -> None:
        assert self._redis is not None
        self._redis.kill()
        self._redis.wait()

    def _client(self) -> Client:
        models = (ModelConfig(name="tiny", path=str(self.model)),)
        return Client(
            DaemonConfig(
                home=self.home("client").path,
                redis_url=self.url,
                models=models,
                runs=self.run_store,
            )
        )

    def home(self, name: str) -> Home:
        """A home; without a run store its run directories are the shared ones."""
        home = Home(self.folder / name)
        if not home.path.exists():
            home.path.mkdir(mode=0o700)
            if self.run_store is None:
                home.runs.symlink_to(self.runs)
        return home

    def node(
        self,
        name: str,
        *options: str,
        command: str = "node",
        source: Path | None = None,
        port: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start `warmd node` or `warmd gateway`.

        `source`: a folder with another version. `port`: of a proxy to Redis.
        """
        environ = self._environ(name, f"redis://127.0.0.1:{port or self.port}/0")
        if source is not None:
            environ["PYTHONPATH"] = str(source)
        return self._start(name, environ, [sys.executable, "-m", "warmd.cli", command, *options])

    def _environ(self, name: str, url: str) -> dict[str, str]:
        """The environment of a node that reaches Redis at `url`."""
        workers = "train-0=train,threads=1;infer-0=infer,isolation=resident,slots=4,threads=1"
        environ = {n: text for n, text in os.environ.items() if not n.startswith("WARMD_")}
        environ |= {"WARMD_HOME": str(self.home(name).path), "WARMD_REDIS_URL": url}
        if self.run_store is not None:
            environ["WARMD_RUNS"] = self.run_store
        environ |= {"WARMD_WORKERS": workers, "WARMD_MODELS": f"tiny={self.model}"}
        return environ | self.settings

    def _start(
        self, name: str, environ: dict[str, str], command: list[str]
    ) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                command,
                env=environ,
                stdout=log,
                stderr=log,
                cwd="/",
            )
        self._processes.append(process)
        self.nodes[name] = process
        return process

    def name_of(self, name: str) -> str:
        return node_name(self.home(name))

    def seen(self, name: str) -> Node | None:
        """The node of a home as others see it; None: it is not listed."""
        wanted = self.name_of(name)
        return next((node for node in self.client.nodes.all() if node.name == wanted), None)

    def wait_ready(self, *names: str, timeout_s: float = 90.0) -> None:
        def are_ready() -> bool:
            found = [self.seen(name) for name in names]
            return all(node is not None and node.state == "ready" for node in found)

        wait_until(are_ready, timeout_s=timeout_s)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def submit(
        self, *, needs: dict[str, str] | None = None, after: str | None = None, **options: Any
    ) -> str:
        """Submit a GRPO job on the tiny model."""
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
            "reward": ["behaviours:length"],
            **options,
        }
        before = Path.cwd()
        os.chdir(Path(__file__).parent)  # where nodes find `behaviours`
        try:
            return self.client.jobs.submit(
                spec_class("grpo").parse(values), Queueing(needs=needs or {}, after=after)
            )
        finally:
            os.chdir(before)

    def wait(self, job_id: str, *statuses: str, timeout_s: float = 90.0) -> dict[str, Any]:
        """Wait until the job has one of the statuses (or has ended)."""
        wanted = statuses or ("finished", "failed", "stopped", "canceled")

        def reached() -> dict[str, Any] | None:
            job = self.client.jobs.get(job_id)
            return job if job["status"] in wanted else None

        found: dict[str, Any] = wait_until(reached, timeout_s=timeout_s)
        return found

    def events(self, job_id: str, type: str) -> list[dict[str, Any]]:
        from warmd.daemon.runs import events

        found = events.read(self.client.rundir(job_id).events)
        return [event for event in found if event["type"] == type]

    def close(self) -> None:
        self.client.close()
        for process in self._processes:
            kill_tree(process)
        if self._redis is not None:
            self.kill_redis()


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a node with all its processes, as a power cut does."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        every = [root, *root.children(recursive=True)]
        for one in every:  # none may restart another
            with suppress(psutil.NoSuchProcess):
                one.suspend()
        for one in every:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


def signal_tree(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Suspend (SIGSTOP) or continue (SIGCONT) a node with all its processes."""
    root = psutil.Process(process.pid)
    for one in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            one.send_signal(number)


def other_version(folder: Path, version: str, *, schema: int) -> Path:
    """Copy the sources with another version and format of run directories; return its folder."""
    target = folder / f"warmd-{version}"
    shutil.copytree(ROOT / "src", target)  # also the compiled files: compiling takes seconds
    for path, line in (
        (target / "warmd" / "__init__.py", f'__version__ = "{version}"'),
        (target / "warmd" / "daemon" / "runs" / "rundir.py", f"SCHEMA = {schema}"),
    ):
        name = line.partition(" = ")[0]
        text = path.read_text().splitlines(keepends=True)
        changed = [f"{line}\n" if row.startswith(f"{name} = ") else row for row in text]
        assert changed != text
        path.write_text("".join(changed))
    return target


@contextmanager
def cluster(model: Path, run_store: str | None = None) -> Iterator[Cluster]:
    """A cluster in a folder with a short path: socket paths are limited."""
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        made = Cluster(Path(folder), model, run_store)
        try:
            yield made
        finally:
            made.close()
