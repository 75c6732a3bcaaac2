"""The daemon itself: `start`, `stop` and `status`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..shared.app import EXIT_INTERRUPTED, App, common_options, note
from ..view import render
from .models import print_models


@click.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME=PATH",
    help="Keep a model warm: a local folder or a hub id, as "
    "NAME=PATH[,dtype=…][,task=…][,precision=…]. May be repeated.  "
    "[default: the configured ones, else a small demo model]",
)
@click.option(
    "--redis",
    "redis_url",
    metavar="URL",
    help="Use this server (redis://, rediss:// or unix://).  [default: one of the daemon's own]",
)
@click.option(
    "--workers",
    multiple=True,
    metavar="NAME=QUEUE",
    help="Run a worker, as NAME=QUEUE[,isolation=…][,slots=…][,threads=…][,nice=…]. May be "
    "repeated.  [default: train-0=train, infer-0=infer,isolation=resident,slots=32]",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Read settings from FILE.  [default: config.yaml in the home, where there is one]",
)
@click.option(
    "--foreground", is_flag=True, help="Stay in the foreground, for systemd and containers."
)
@common_options
@click.pass_obj
def start(
    app: App,
    models: tuple[str, ...],
    redis_url: str | None,
    workers: tuple[str, ...],
    config_file: Path | None,
    foreground: bool,
) -> int:
    """Start the daemon and return when its workers are warm."""
    from ...daemon.client import control

    given = {"models": list(models), "redis_url": redis_url, "workers": list(workers)}
    overrides = {name: value for name, value in given.items() if value}
    config = app.config(file=config_file, overrides=overrides)
    if foreground:
        from ...daemon.supervise.guardian import guard

        return guard(config, report=lambda message: None, foreground=True)
    begun = time.monotonic()
    try:
        for progress in control.start(config):
            if progress["stage"] == "ready":
                progress["seconds"] = time.monotonic() - begun
            _show_progress(app, progress)
    except KeyboardInterrupt:
        note(f"\nThe daemon goes on starting. Look at it with: {app.command('status')}")
        return EXIT_INTERRUPTED
    return 0


def _show_progress(app: App, progress: Mapping[str, Any]) -> None:
    if app.as_json:
        render.json_line(progress)
    elif progress.get("done", True):
        click.echo(_report(progress))
    elif sys.stderr.isatty():
        note(f"{_report(progress)} …")


def _report(progress: Mapping[str, Any]) -> str:
    """One line of the startup report."""
    stage = " ".join(filter(None, (progress["stage"], progress.get("name"))))
    seconds, num_bytes = progress.get("seconds"), progress.get("memory_bytes")
    line = f"{stage:<24}"
    if seconds is not None:
        line += f"  {render.duration(seconds):>8}"
    if num_bytes is not None:
        line += f"  {render.size(num_bytes):>8}"
    return line.rstrip()


@click.command()
@click.option(
    "--now", is_flag=True, help="Kill running jobs; they go on from their checkpoints later."
)
@common_options
@click.pass_obj
def stop(app: App, now: bool) -> None:
    """Stop the daemon; its jobs go on after the next start.

    Running jobs save a checkpoint first, which can take a step's time.
    """
    from ...daemon.client import control

    for progress in control.stop(app.config(), now=now):
        if app.as_json:
            render.json_line(progress)
        else:
            note("  ".join(str(value) for value in progress.values() if value is not None))
    if app.as_json:
        render.json_line({"stage": "stopped"})
    else:
        click.echo("stopped")


@click.command()
@common_options
@click.pass_obj
def status(app: App) -> None:
    """Show the daemon with its workers, models and queues."""
    from ...daemon.client import control

    found = control.status(app.config())
    client = app.client()
    found["queues"] = client.queues()
    running = {job["id"]: job for job in client.jobs(statuses=["started"])}
    for worker in found["workers"]:
        job = running.get(worker["job"], {})
        worker.update(step=job.get("step"), steps_total=job.get("steps_total"))
    if app.as_json:
        render.json_line(found)
        return
    render.print_fields(
        {name: _summary(found[name]) for name in ("daemon", "server", "zygote", "http")}
    )
    click.echo()
    _print_workers(found["workers"])
    click.echo()
    print_models(found["models"])
    click.echo()
    _print_queues(found["queues"])


def _summary(fields: Mapping[str, Any]) -> str:
    """Everything known of one process, on one line, with units made out of the names."""
    parts = []
    for name, value in fields.items():
        if value is None or isinstance(value, list | dict):
            continue
        if name.endswith("_bytes"):
            parts.append(f"{name.removesuffix('_bytes')} {render.size(value)}")
        elif name.endswith("_s"):
            parts.append(f"{name.removesuffix('_s')} {render.duration(value)}")
        elif name == "started":
            parts.append(f"since {render.clock(value)}")
        else:
            parts.append(f"{name} {render.one_line(value)}")
    return ", ".join(parts)


def _print_workers(workers: list[dict[str, Any]]) -> None:
    rows = [
        [
            worker["name"],
            worker["queue"],
            worker["state"],
            render.steps(worker),
            render.duration(worker["uptime_s"]),
            _jobs_of(worker),
        ]
        for worker in workers
    ]
    render.print_table(["WORKER", "QUEUE", "STATE", ">STEP", ">UP", "JOB"], rows)


def _jobs_of(worker: dict[str, Any]) -> str:
    """The job that a worker runs, and how many others."""
    others = len(worker["jobs"]) - 1
    return f"{worker['job'] or render.NOTHING}{f' and {others} more' if others > 0 else ''}"


def _print_queues(queues: list[dict[str, Any]]) -> None:
    statuses = [name for name in queues[0] if name != "name"]
    rows = [[queue["name"], *(str(queue[name]) for name in statuses)] for queue in queues]
    render.print_table(["QUEUE", *(f">{name.upper()}" for name in statuses)], rows)
