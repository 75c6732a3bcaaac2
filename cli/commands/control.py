"""The daemon itself: `start`, `stop` and `status`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...configs import gpus
from ...configs.values import ConfigError
from ...jobs.errors import Conflict
from ..shared.app import EXIT_INTERRUPTED, App, common_options, note
from ..shared.given import GivenPath
from ..view import render
from ..view.live import ClockLine, has_live_lines
from .models import print_models

if TYPE_CHECKING:
    from ...configs.config import DaemonConfig


@click.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME=PATH",
    help="Model to load: a local folder or a hub id, as "
    "NAME=PATH[,dtype=…][,task=…][,precision=…][,response_template=…]. May be repeated.  "
    "[default: the configured ones, else a small demo model]",
)
@click.option(
    "--redis",
    "redis_url",
    metavar="URL",
    help="URL of the Redis to use (redis://, rediss:// or unix://).  [default: an embedded one]",
)
@click.option(
    "--workers",
    multiple=True,
    metavar="NAME=QUEUE",
    help="Worker to run, as NAME=QUEUE[,isolation=…][,slots=…][,threads=…][,nice=…]"
    "[,device=…]; auto: one train worker per GPU. May be repeated.  "
    "[default: train-0=train, infer-0=infer,isolation=resident,slots=32]",
)
@click.option(
    "--config",
    "config_file",
    type=GivenPath(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Settings file.  [default: config.yaml in the home, if there is one]",
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
    """Start the daemon and return when its workers are ready."""
    from ...daemon.client import control

    given = {"models": list(models), "redis_url": redis_url, "workers": list(workers)}
    overrides = {name: value for name, value in given.items() if value}
    config = app.config(file=config_file, overrides=overrides)
    note_tokens(config)
    if foreground:
        from ...daemon.supervise.guardian import guard

        return guard(config, report=lambda message: None, foreground=True)
    begun = time.monotonic()
    try:
        with ClockLine(enabled=has_live_lines() and not app.as_json) as line:
            line.show("redis …")
            for progress in control.start(config):
                if progress["stage"] == "ready":
                    progress["seconds"] = time.monotonic() - begun
                _show_progress(app, progress, line)
    except Conflict as error:
        if not models:
            raise
        load = app.command(f"load {shlex.quote(models[0])}")
        raise Conflict(f"{error}; to load a model into the running daemon: {load}") from error
    except KeyboardInterrupt:
        note(f"\nThe daemon continues to start. See: {app.command('status')}")
        return EXIT_INTERRUPTED
    if app.as_json:
        return 0
    _note_addresses(config)
    if sys.stderr.isatty():
        note(f"Next: {app.command('run PROMPT')}, or {app.command('submit grpo --help')}")
    return 0


def note_tokens(config: DaemonConfig) -> None:
    """Print the error of an invalid file of named tokens; the daemon starts without its names."""
    from ...configs.tokens import read

    if config.http_tokens is not None:
        try:
            read(config.http_tokens)
        except ConfigError as error:
            note(f"no named token is let in: {error}")


def _note_addresses(config: DaemonConfig) -> None:
    """Print the addresses of HTTP API and dashboard; for port 0 `warmd status` shows the port."""
    if not config.http_port:
        return
    address = f"http://{config.http_host}:{config.http_port}"
    note(f"HTTP API: {address}/v1")
    if config.http_page != "off":
        note(f"Dashboard: {address}/")


def _show_progress(app: App, progress: Mapping[str, Any], line: ClockLine) -> None:
    """Print a completed stage; the live line shows the current one."""
    if app.as_json:
        render.json_line(progress)
    elif progress.get("done", True):
        line.show("")
        click.echo(stage_line(progress))
        line.show(_NEXT.get(progress["stage"], ""))
    else:
        line.show(f"{stage_line(progress)} …")


_NEXT = {
    "server": "imports …",
    "recovery": "imports …",
    "imports": "workers …",
    "model": "workers …",
}


def stage_line(progress: Mapping[str, Any]) -> str:
    """One line of the startup report."""
    stage = {"server": "redis"}.get(progress["stage"], progress["stage"])
    stage = " ".join(filter(None, (stage, progress.get("name"))))
    seconds, num_bytes = progress.get("seconds"), progress.get("memory_bytes")
    if problem := progress.get("problem"):
        return f"{stage:<24}  not loaded: {problem}"
    line = f"{stage:<24}"
    if text := progress.get("note"):
        line += f"  {text}"
    if seconds is not None:
        line += f"  {render.duration(seconds):>8}"
    if num_bytes is not None:
        line += f"  {render.size(num_bytes):>8}"
    return line.rstrip()


@click.command()
@click.option(
    "--now", is_flag=True, help="Kill running jobs; they resume from their checkpoints later."
)
@common_options
@click.pass_obj
def stop(app: App, now: bool) -> None:
    """Stop the daemon; unfinished jobs resume at the next start.

    Running jobs end their current step and save a checkpoint first.
    """
    from ...daemon.client import control

    for progress in control.stop(app.config_of_home(), now=now):
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
    """Show the daemon, its workers, models and queues."""
    from ...daemon.client import control
    from ...daemon.lifecycle.view import JobFilter

    found = control.status(app.config())
    client = app.client()
    found["queues"] = client.jobs.queues()
    running = {job["id"]: job for job in client.jobs.all(JobFilter(statuses=["started"]))}
    for worker in found["workers"]:
        job = running.get(worker["job"], {})
        worker.update(step=job.get("step"), steps_total=job.get("steps_total"))
    found["gpus"] = [asdict(gpu) for gpu in _gpus()]
    if app.as_json:
        render.json_line(found)
        return
    parts = {"daemon": "daemon", "redis": "server", "zygote": "zygote", "http": "http"}
    render.print_fields({title: _summary(found[name]) for title, name in parts.items()})
    click.echo()
    if tokens := found["http"].get("tokens"):  # an earlier version, still running, has none
        _print_tokens(tokens)
    _print_workers(found["workers"])
    click.echo()
    if found["gpus"]:
        _print_gpus(found["gpus"])
        click.echo()
    print_models(found["models"])
    click.echo()
    _print_queues(found["queues"])
    _note_upgrades(found["daemon"])


def _print_tokens(tokens: Mapping[str, Any]) -> None:
    """Who uses the HTTP API now, by the names of their tokens."""
    if tokens["problem"] is not None:
        note(f"http_tokens: {tokens['named']} let in: {render.one_line(tokens['problem'])}")
    if tokens["open"]:
        rows = [[one["name"], str(one["requests"]), str(one["streams"])] for one in tokens["open"]]
        render.print_table(["TOKEN", ">REQUESTS", ">STREAMS"], rows)
        click.echo()


def _summary(fields: Mapping[str, Any]) -> str:
    """All values of one process on one line, with units by the names."""
    parts = []
    for name, value in fields.items():
        if value is None or isinstance(value, list | dict):
            continue
        words = name.replace("_", " ")
        if isinstance(value, bool):
            parts.append(words if value else f"not {words}")
        elif name.endswith("_bytes"):
            parts.append(f"{name.removesuffix('_bytes')} {render.size(value)}")
        elif name.endswith("_s"):
            parts.append(f"{name.removesuffix('_s')} {render.duration(value)}")
        elif name == "started":
            parts.append(f"since {render.clock(value)}")
        else:
            parts.append(f"{words} {render.one_line(value)}")
    return ", ".join(map(render.phrase, parts))


def _note_upgrades(daemon: Mapping[str, Any]) -> None:
    """Print the versions that the processes run if newer ones are installed."""
    if upgrades := daemon["upgrades"]:
        note(f"\nupgraded since the daemon started: {', '.join(upgrades)}: `warmd reload`")
    elif upgrades := daemon["own_upgrades"]:
        note(
            f"\n{', '.join(upgrades)}: supervisor and gateway still run the old version: "
            "`warmd stop`, then `warmd start`"
        )


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
    """The first job that a worker runs, and the number of others."""
    others = len(worker["jobs"]) - 1
    return f"{worker['job'] or render.NOTHING}{f' and {others} more' if others > 0 else ''}"


def _gpus() -> list[gpus.Gpu]:
    try:
        return gpus.read()
    except OSError as error:
        note(f"GPUs: {error}")
        return []


def _print_gpus(found: list[dict[str, Any]]) -> None:
    rows = [
        [
            str(gpu["index"]),
            gpu["name"],
            gpu["driver"],
            render.size(gpu["free_bytes"]),
            render.size(gpu["total_bytes"]),
            gpu["persistence_mode"] or render.NOTHING,
            gpu["uuid"],
        ]
        for gpu in found
    ]
    render.print_table(["GPU", "NAME", "DRIVER", ">FREE", ">MEMORY", "PERSISTENCE", "UUID"], rows)


def _print_queues(queues: list[dict[str, Any]]) -> None:
    statuses = [name for name in queues[0] if name != "name"]
    rows = [[queue["name"], *(str(queue[name]) for name in statuses)] for queue in queues]
    render.print_table(["QUEUE", *(f">{name.upper()}" for name in statuses)], rows)
