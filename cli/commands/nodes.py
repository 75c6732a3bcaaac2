"""Several machines on one Redis: `node`, `gateway` and `nodes`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ...configs.labels import GANG_SOFTWARE, line_of
from ...configs.queues import QUEUES
from ...configs.values import ConfigError, choice
from ...jobs.errors import SpecError
from ..shared.app import App, common_options, note
from ..shared.given import GivenPath
from ..view import render
from .control import stage_line

if TYPE_CHECKING:
    from ...configs.config import DaemonConfig
    from ...daemon.queue.nodes import Node

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

_POLL_S = 0.5


def _shared_options(function: AnyFunction) -> AnyFunction:
    options = (
        click.option(
            "--redis",
            "redis_url",
            metavar="URL",
            help="Redis of all machines (redis://, rediss://, redis+sentinel:// or unix://).  "
            "[default: the setting redis_url]",
        ),
        click.option(
            "--config",
            "config_file",
            type=GivenPath(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Settings file.  [default: config.yaml in the home, if there is one]",
        ),
        click.option(
            "--model",
            "models",
            multiple=True,
            metavar="NAME=PATH",
            help="Model, as for `warmd start`. May be repeated.  [default: the configured ones]",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


@click.command()
@_shared_options
@click.option(
    "--queues",
    metavar="QUEUES",
    help="Queues to take jobs from: train, infer or train,infer.  [default: those of the workers]",
)
@click.option(
    "--labels",
    metavar="LABELS",
    help="Labels of this machine, such as gpu=h200,zone=b; jobs request them with `submit "
    "--needs`.  [default: none]",
)
@click.option(
    "--idle-exit",
    metavar="DURATION",
    help="Time without a job after which the node leaves, such as 10m.  [default: never]",
)
@click.option(
    "--max-jobs",
    metavar="N",
    help="Number of jobs to run; then the node takes no more and leaves.  [default: unlimited]",
)
@common_options
@click.pass_obj
def node(
    app: App,
    redis_url: str | None,
    config_file: Path | None,
    models: tuple[str, ...],
    queues: str | None,
    labels: str | None,
    idle_exit: str | None,
    max_jobs: str | None,
) -> int:
    """Run jobs of a shared Redis on this machine, in the foreground.

    A node has workers and warm models, but no Redis and no gateway. On SIGTERM its jobs save a
    checkpoint and resume on another node; with `warmd nodes --drain` they end first.
    """
    given = {
        "redis_url": redis_url,
        "models": list(models),
        "labels": labels,
        "idle_exit": idle_exit,
        "max_jobs": max_jobs,
    }
    config = _config(app, config_file, given)
    workers = config.workers
    if queues is not None:
        wanted = [choice("queues", text.strip(), QUEUES) for text in queues.split(",")]
        workers = tuple(worker for worker in workers if worker.queue in wanted)
        missing = set(wanted) - {worker.queue for worker in workers}
        if missing:
            takes = f"must be queues of the setting workers, got {', '.join(sorted(missing))}"
            raise ConfigError("queues", takes)
    return _run(replace(config, workers=workers, http_port=None))


@click.command()
@_shared_options
@click.option(
    "--host", "http_host", metavar="HOST", help="Address to listen on.  [default: 127.0.0.1]"
)
@click.option("--port", "http_port", metavar="PORT", help="Port to listen on.  [default: 8421]")
@common_options
@click.pass_obj
def gateway(
    app: App,
    redis_url: str | None,
    config_file: Path | None,
    models: tuple[str, ...],
    http_host: str | None,
    http_port: str | None,
) -> int:
    """Run only the HTTP API of a shared Redis, in the foreground.

    Its requests become jobs, which nodes run.
    """
    given = {
        "redis_url": redis_url,
        "models": list(models),
        "http_host": http_host,
        "http_port": http_port,
    }
    config = _config(app, config_file, given)
    if config.http_port is None:
        raise ConfigError("http_port", "must be a port, got off")
    return _run(replace(config, workers=()))


def _config(app: App, config_file: Path | None, given: dict[str, Any]) -> DaemonConfig:
    overrides = {name: value for name, value in given.items() if value not in (None, [])}
    config = app.config(file=config_file, overrides=overrides)
    if not config.is_shared:
        raise ConfigError("redis_url", "must be given: --redis URL of the Redis of all machines")
    return config


def _run(config: DaemonConfig) -> int:
    from ...daemon.supervise.guardian import guard

    return guard(config, report=_report, foreground=True)


def _report(message: object) -> None:
    """Show the progress of the start: libraries and models take seconds."""
    if is_dataclass(message) and not isinstance(message, type):
        fields = {name: value for name, value in asdict(message).items() if value is not None}
        if "stage" in fields:
            note(stage_line(fields) if fields["done"] else f"{stage_line(fields)} …")
        elif "pid" in fields:
            note("ready")


@click.command()
@click.option(
    "--drain",
    metavar="NODE",
    help="Let a node end its jobs, take no more, and leave: its name or a unique prefix.",
)
@click.option("--wait", is_flag=True, help="With --drain: wait until the node has left.")
@common_options
@click.pass_obj
def nodes(app: App, drain: str | None, wait: bool) -> None:
    """List the machines that share this Redis, or drain one."""
    if drain is not None:
        _drain(app, drain, wait=wait)
        return
    if wait:
        raise SpecError("wait", "must go with drain")
    found = app.client().nodes.all()
    if app.as_json:
        for one in found:
            render.json_line(one.to_json())
        return
    headers = ["NODE", "STATE", "VERSION", "QUEUES", "LABELS", ">BEAT", "JOBS"]
    render.print_table(headers, [_row(one) for one in found])


def _row(found: Node) -> list[str]:
    state = f"{found.state}, leads" if found.is_leader else found.state
    if found.is_draining and found.state != "draining":
        state += ", to drain"
    return [
        found.name,
        state,
        found.version,
        ",".join(f"{queue}={slots}" for queue, slots in found.queues.items()) or render.NOTHING,
        line_of(_readable(found)),
        f"{render.duration(found.silent_s)} ago",
        " ".join(found.jobs) or render.NOTHING,
    ]


def _readable(found: Node) -> dict[str, str]:
    """The labels; name and version have columns of their own, and bytes are hard to read."""
    shown_elsewhere = ("machine", GANG_SOFTWARE)
    labels = {key: value for key, value in found.labels.items() if key not in shown_elsewhere}
    if labels.get("memory", "").isdigit():
        labels["memory"] = render.size(int(labels["memory"])).replace(" ", "")
    return labels


def _drain(app: App, node: str, *, wait: bool) -> None:
    client = app.client()
    found = client.nodes.drain(node)
    if not app.as_json:
        running = ", ".join(found.jobs) or "no jobs"
        click.echo(f"draining {found.name}: runs {running}")
    while wait:
        here = next((one for one in client.nodes.all() if one.name == found.name), None)
        if here is None:
            break
        if here.state == "silent":
            note(f"{found.name} is silent since {render.duration(here.silent_s)}")
        time.sleep(_POLL_S)
    if app.as_json:
        render.json_line({**found.to_json(), "is_draining": True, "has_left": wait})
    elif wait:
        click.echo(f"{found.name} has left")
