"""A daemon for one benchmark, in a temporary home, and helpers for its jobs."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from warmd.configs.config import DaemonConfig, parse_model
from warmd.daemon.client import control
from warmd.daemon.client.client import Client
from warmd.daemon.host.parent_death import tied_to_parent
from warmd.jobs import spec_class
from warmd.jobs.errors import JobFailed, Unavailable


@contextmanager
def own_daemon(*models: str, **settings: Any) -> Iterator[Client]:
    """Start a daemon and give a client when its workers are warm; end it and delete its home.

    `models` are NAME=FOLDER, as `warmd start --model` takes them; `settings` those of DaemonConfig,
    where HTTP is off unless `http_port` is 0. Ends with this process, however that ends: SIGTERM
    raises SystemExit from now on, so that the home goes too. Raises WarmdError when it cannot boot.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        config = DaemonConfig(
            home=Path(folder, "home"),
            models=tuple(parse_model(model, Path.cwd()) for model in models),
            stop_grace_s=0.0,  # jobs that still run at the end do not matter
            **{"http_port": None, **settings},
        )
        # Not by control.start, whose daemon outlives its starter: a leash holds at any moment, be
        # it before the daemon answers, or at a second Ctrl-C.
        with subprocess.Popen(
            tied_to_parent([sys.executable, "-m", "warmd.daemon"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            try:
                for _ in control.boot(process, config):
                    pass  # until its workers are warm
                with closing(Client(config)) as client:
                    yield client
            finally:
                process.terminate()


def api_of(client: Client) -> str:
    """The URL of the daemon's OpenAI API, once it listens. Raises Unavailable when it cannot."""
    while (http := control.status(client.config)["http"])["url"] is None:
        if http["problem"]:
            raise Unavailable(http["problem"])
        time.sleep(0.01)
    return f"{http['url']}/v1"


def submit_until(
    client: Client, type: str, kind: str, **options: Any
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Submit a job and follow it to an event of `type`; return its id and its events by type.

    Raises JobFailed when it ends before.
    """
    job_id = client.jobs.submit(spec_class(kind).parse(options))
    events: dict[str, dict[str, Any]] = {}
    for event in client.jobs.follow(job_id):
        if event is None:
            continue
        events[event["type"]] = event
        if event["type"] == type:
            return job_id, events
    raise JobFailed(f"{job_id}: {client.jobs.get(job_id)['error'] or 'ended'}, before any {type}")


def kill(client: Client, job_id: str) -> None:
    """Kill a job that runs, and wait until its worker is free."""
    client.jobs.kill(job_id)
    while client.jobs.get(job_id)["status"] != "stopped":
        time.sleep(0.01)
