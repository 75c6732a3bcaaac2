"""Jobs of a daemon: their device, kill -9 and resume, and saves concurrent with training."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
from typing import Any

from own_daemon import own_daemon

from warmd.daemon.client.client import Client
from warmd.jobs import spec_class

from . import DEVICE, fact


def follow(client: Client, job_id: str, *, kill_at: int | None = None) -> list[dict[str, Any]]:
    """Follow a job to its end; kill its process after a step of its first execution."""
    found = []
    for event in client.jobs.follow(job_id):
        if event is None:
            continue
        found.append(event)
        if event["type"] == "step" and event["step"] == kill_at and event["execution"] == 1:
            pid = client.rundir(job_id).holder()
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
    return found


def check(client: Client) -> None:
    """Train, kill, resume, generate and verify."""
    steps = 40
    options = {"model": "demo", "samples": steps, "save_every": "2"}
    job_id = client.jobs.submit(spec_class("grpo").parse(options))
    events = follow(client, job_id, kill_at=steps // 2)
    by_type = {event["type"]: event for event in events}
    devices = {event["device"] for event in events if event["type"] == "started"}
    fact("GRPO computes on", sorted(devices), DEVICE, devices == {DEVICE})
    is_resumed = by_type.get("finished", {}).get("execution", 1) > 1
    fact("killed with -9, it resumed and finished", is_resumed, "True", is_resumed)
    blocked = [event["blocked_s"] for event in events if event["type"] == "checkpoint"]
    fact("a checkpoint blocks the training, s (median)", statistics.median(blocked), "< 0.1")
    answers = [
        client.jobs.submit(spec_class("infer").parse({"model": "demo", "prompt": "17+58="}))
        for _ in range(2)
    ]
    for number, answer in enumerate(answers):
        said = follow(client, answer)
        is_done = said[-1]["type"] == "finished"
        fact(f"request {number + 1} is served", said[-1]["type"], "finished", is_done)
    command = [sys.executable, "-m", "warmd.cli", "--home", str(client.config.home)]
    done = subprocess.run(
        [*command, "checkpoints", "verify", "--resume", job_id, "--steps", "6"],
        capture_output=True,
        text=True,
    )
    verdict = (done.stdout or done.stderr).strip().splitlines()[-1]
    fact("checkpoints verify --resume", verdict, "is exact", done.returncode == 0)


if __name__ == "__main__":
    with own_daemon("demo=builtin:demo") as client:
        check(client)
