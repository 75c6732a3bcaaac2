"""Helpers that disturb a daemon: hold a job at a step, suspend a process, check what remains."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
from daemons import Daemon
from waiting import wait_until

from warmd.daemon.host.home import Home

MakeDaemon = Callable[..., Daemon]
STEPS = [1, 2, 3, 4, 5, 6]
NOBODY = "grpo-20260101-000000-zzzz"  # an id that no job has


def pids(daemon: Daemon) -> list[int]:
    return [daemon.pid(name) for name in ("supervisor", "zygote", "worker")]


@contextlib.contextmanager
def frozen(daemon: Daemon, name: str) -> Iterator[psutil.Process]:
    """Stop a process for a while; it may be killed meanwhile."""
    process = psutil.Process(daemon.pid(name))
    process.suspend()
    # The server still serves what the worker was waiting for: let that time out first.
    wait_until(lambda: info(daemon)["blocked_clients"] == 0)
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def info(daemon: Daemon) -> dict[str, Any]:
    found: Any = daemon.client.connection.info("clients")
    return dict(found)


def hold(daemon: Daemon, **options: Any) -> str:
    """Run a job until its third step, where it waits; it has two checkpoints."""
    (daemon.folder / "calls").unlink(missing_ok=True)
    (daemon.folder / "gate").touch()
    job_id = daemon.submit("behaviours:gated", save_every=1, **options)
    wait_until((daemon.home.runs / job_id / "checkpoints" / "checkpoint-2").exists)
    return job_id


def let_go(daemon: Daemon) -> None:
    (daemon.folder / "gate").unlink()


def steps(daemon: Daemon, job_id: str) -> list[int]:
    return [event["step"] for event in daemon.events(job_id, "step")]


def weights(daemon: Daemon, job_id: str) -> bytes:
    return (daemon.home.runs / job_id / "model" / "model.safetensors").read_bytes()


def processes_of(home: Home) -> list[psutil.Process]:
    """Every process that names the home, but for the guardian and its supervisor, which do not."""
    found = psutil.process_iter(["cmdline"])
    return [
        process for process in found if str(home.path) in " ".join(process.info["cmdline"] or ())
    ]


def wait_for(seconds: float) -> None:
    """Let time itself pass, where that is what is tested."""
    over = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > over)
