"""Reading what is there: `queue`, `jobs`, `show` and `result`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import click

from ...jobs.errors import Conflict, JobFailed
from ..shared.app import App, common_options
from ..shared.job_argument import job_argument
from ..view import render

STATUSES = (
    "queued",
    "started",
    "finished",
    "failed",
    "stopped",
    "canceled",
    "deferred",
    "scheduled",
    "paused",
    "unregistered",
)

# What `queue` shows, in its order: what runs, what waits, what waits for something else.
_PAUSABLE = {"started", "scheduled"}

_PENDING = ("started", "queued", "scheduled", "deferred")


@click.command()
@common_options
@click.pass_obj
def queue(app: App) -> None:
    """Show the jobs that run and wait, in their order."""
    jobs = app.client().jobs(statuses=_PENDING)
    jobs.sort(key=_turn)
    if app.as_json:
        for job in jobs:
            render.json_line(job)
        return
    rows = [
        [
            render.NOTHING if job["position"] is None else str(job["position"]),
            job["id"],
            job["queue"],
            job["model"] or render.NOTHING,
            render.status(_status(job)),
            render.duration(time.time() - job["created_at"]),
            render.steps(job),
            render.duration(job["eta_s"]),
            _waits_for(job),
        ]
        for job in jobs
    ]
    headers = [">POS", "JOB", "QUEUE", "MODEL", "STATUS", ">AGE", ">STEP", ">ETA", "WAITS FOR"]
    render.print_table(headers, rows)


def _turn(job: dict[str, Any]) -> tuple[Any, ...]:
    return (
        job["queue"],
        _PENDING.index(job["status"]),
        job["position"] or 0,
        job["created_at"],
    )


def _status(job: dict[str, Any]) -> str:
    """RQ knows no pause: to it such a job is started, or scheduled for the end of time."""
    return "paused" if job["paused"] else str(job["status"])


def _waits_for(job: dict[str, Any]) -> str:
    if job["paused"]:
        return "unpause"
    if job["status"] == "deferred":
        return ", ".join(job["after"])
    return render.clock(job["scheduled_at"]) if job["status"] == "scheduled" else ""


@click.command()
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice(STATUSES),
    help="Only jobs of that status. May be repeated.  [default: all]",
)
@click.option(
    "--limit", type=click.IntRange(min=1), help="Only the latest so many.  [default: all]"
)
@common_options
@click.pass_obj
def jobs(app: App, statuses: tuple[str, ...], limit: int | None) -> None:
    """List all jobs, the newest first."""
    wanted = {*statuses, *(_PAUSABLE if "paused" in statuses else ())}
    # Which of them are paused is known of their views alone; there are few that run or wait.
    first = None if wanted & _PAUSABLE else limit
    found = app.client().jobs(statuses=wanted or None, limit=first)
    if statuses:
        found = [job for job in found if _status(job) in statuses]
    found = found[:limit]
    if app.as_json:
        for job in found:
            render.json_line(job)
        return
    rows = [
        [
            job["id"],
            job["model"] or render.NOTHING,
            render.status(_status(job)),
            render.steps(job),
            render.clock(job["created_at"]),
            render.duration(_took_s(job)),
            render.one_line(job["error"] or job["problem"] or ""),
        ]
        for job in found
    ]
    headers = ["JOB", "MODEL", "STATUS", ">STEP", "CREATED", ">TOOK", "ERROR"]
    render.print_table(headers, rows)


def _took_s(job: dict[str, Any]) -> float | None:
    if job["started_at"] is None:
        return None
    took: float = (job["ended_at"] or time.time()) - job["started_at"]
    return took


@click.command()
@job_argument
@common_options
@click.pass_obj
def show(app: App, job: str | None) -> None:
    """Show all that is known of JOB."""
    client = app.client()
    found = client.job(client.find(job))
    if app.as_json:
        render.json_line(found)
        return
    times = {"created_at", "enqueued_at", "scheduled_at", "started_at", "ended_at"}
    shown = {}
    for name, value in found.items():
        if value is None or value == [] or name in ("step", "paused"):
            continue
        if name in times:
            shown[name.removesuffix("_at")] = render.clock(value)
        elif name == "steps_total":
            shown["step"] = render.steps(found)
        elif name == "status":
            shown[name] = render.status(_status(found))
        elif name == "seconds_per_step":
            shown["pace"] = f"{render.duration(value)}/step"
        elif name == "result":
            shown[name] = ", ".join(f"{k} {v}" for k, v in _flat(value) if "." not in k)
        else:
            text = ", ".join(value) if isinstance(value, list) else value
            shown[name] = render.one_line(text)
    render.print_fields(shown)


@click.command()
@job_argument
@common_options
@click.pass_obj
def result(app: App, job: str | None) -> None:
    """Print the result of JOB."""
    client = app.client()
    job_id = client.find(job)
    values = client.result(job_id)
    if values is None:
        raise _no_result(app, client.job(job_id))
    if app.as_json:
        render.json_line(values)
    else:
        render.print_fields(dict(_flat(values)))


def _no_result(app: App, job: dict[str, Any]) -> Exception:
    job_id, status = job["id"], _status(job)
    if status == "failed":
        return JobFailed(f"{job_id} failed: {job['error']}")
    if status in ("stopped", "canceled"):
        command = app.command(f"resume {job_id}")
        return Stopped(f"{job_id} was {status} and has no result; go on with: {command}")
    return Conflict(
        f"{job_id} has no result yet ({status}, step {render.steps(job)}); "
        f"follow it with: {app.command(f'tail {job_id}')}"
    )


class Stopped(click.ClickException):
    """The job was stopped before it had a result."""

    exit_code = 4


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values as text; what is nested gets names like `metrics.loss`."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, render.number(value)
        elif value is not None:
            yield prefix + name, render.one_line(value)
