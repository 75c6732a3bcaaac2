"""Reading jobs: `queue`, `jobs`, `show` and `result`. All work without a daemon."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import click

from ...configs.labels import line_of
from ...jobs import KINDS, spec_class
from ...jobs.errors import Conflict, JobFailed, NotFound
from ..shared.app import App, common_options, note
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

# Words for statuses that `jobs --status` takes, too.
_WORDS = {
    "running": ("started",),
    "waiting": ("queued", "scheduled", "deferred", "paused"),
    "pending": ("queued", "scheduled", "deferred", "paused"),
    "ended": ("finished", "failed", "stopped", "canceled"),
    "done": ("finished",),
    "completed": ("finished",),
    "succeeded": ("finished",),
    "error": ("failed",),
    "killed": ("stopped",),
    "cancelled": ("canceled",),
}

_LIMIT = 20

_LABELED = ("NAME",)  # the column that a table has if one of its jobs has a name or tags

# RQ has no status for a pause: a paused job has one of these.
_PAUSABLE = {"started", "scheduled"}

# What `queue` shows, in this order.
_PENDING = ("started", "queued", "scheduled", "deferred")


@click.command()
@common_options
@click.pass_obj
def queue(app: App) -> None:
    """Show running and waiting jobs, in queue order.

    A sweep is one line, with the steps of all its jobs.
    """
    client = app.reader()
    members = client.sweep_members()
    jobs = client.jobs(statuses=_PENDING, hidden=members)
    jobs += [sweep for sweep in client.sweeps() if sweep["status"] in _PENDING] if members else []
    jobs.sort(key=_queue_order)
    if app.as_json:
        for job in jobs:
            render.json_line(job)
        return
    now = client.now()
    labeled = _LABELED if any(map(render.labels, jobs)) else ()
    rows = [
        [
            render.NOTHING if job["position"] is None else str(job["position"]),
            job["id"],
            *(render.labels(job) for _ in labeled),
            job["queue"],
            job["model"] or render.NOTHING,
            render.status(_status(job)),
            render.duration(now - job["created_at"]),
            render.steps(job),
            render.duration(job["eta_s"]),
            _waits_for(job),
        ]
        for job in jobs
    ]
    headers = [">POS", "JOB", *labeled, "QUEUE", "MODEL", "STATUS", ">AGE", ">STEP", ">ETA"]
    headers.append("WAITS FOR")
    render.print_table(headers, rows, empty="no job runs or waits; all jobs: warmd jobs --all")


def _queue_order(job: dict[str, Any]) -> tuple[Any, ...]:
    return (
        job["queue"],
        _PENDING.index(job["status"]),
        job["position"] or 0,
        job["created_at"],
    )


def _status(job: dict[str, Any]) -> str:
    return "paused" if job["paused"] else str(job["status"])


def _waits_for(job: dict[str, Any]) -> str:
    if job["paused"]:
        return "unpause"
    if job["status"] == "deferred":
        return ", ".join(job["after"])
    if job["status"] == "queued" and job["position"] is None:
        # It is set aside: no worker that could take it had these labels, and this model.
        missing = [f"a machine with {job['missing_model']}"] if job["missing_model"] else []
        return ", ".join([*missing, *([line_of(job["needs"])] if job["needs"] else [])])
    return render.clock(job["scheduled_at"]) if job["status"] == "scheduled" else ""


@click.command()
@click.option(
    "--all", "all_", is_flag=True, help="Include answers: jobs of the kinds infer and encode."
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(list(KINDS)),
    help="Only jobs of this kind. May be repeated.  [default: training kinds and eval]",
)
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice([*STATUSES, *_WORDS]),
    metavar="STATUS",
    help=f"Only jobs with this status: {', '.join(STATUSES)}; or running, waiting or ended. "
    "May be repeated.  [default: all]",
)
@click.option(
    "--name",
    metavar="PATTERN",
    help="Only jobs whose name matches PATTERN, in which * and ? are wildcards.  [default: all]",
)
@click.option(
    "--tag",
    "tags",
    multiple=True,
    metavar="TAG",
    help="Only jobs with this tag. May be repeated: only jobs that have all of the tags.  "
    "[default: all]",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1, max=10_000_000),
    default=_LIMIT,
    show_default=True,
    metavar="N",
    help="Maximum number of jobs to list.",
)
@common_options
@click.pass_obj
def jobs(
    app: App,
    all_: bool,
    kinds: tuple[str, ...],
    statuses: tuple[str, ...],
    name: str | None,
    tags: tuple[str, ...],
    limit: int,
) -> None:
    """List training jobs and evaluations, newest first.

    A sweep is one line; `--tag SWEEP` lists its jobs.
    """
    from ...daemon.runs.labels import Labels

    named = {name for word in statuses for name in _WORDS.get(word, (word,))}
    wanted = {*named, *(_PAUSABLE if "paused" in named else ())}
    # Only the view of a job says whether it is paused; few jobs run or wait.
    first = None if wanted & _PAUSABLE else limit + 1
    of_kinds = kinds or (None if all_ else _kept_kinds())
    client = app.reader()
    # With a filter by name or tag, the jobs of a sweep are listed one by one.
    is_grouped = name is None and not tags
    found = client.jobs(
        statuses=wanted or None,
        limit=first,
        kinds=of_kinds,
        labels=Labels(name=name, tags=tags),
        hidden=client.sweep_members() if is_grouped else (),
    )
    if is_grouped:
        sweeps = [one for one in client.sweeps(limit + 1) if not kinds or one["kind"] in kinds]
        found = sorted([*found, *sweeps], key=lambda job: job["created_at"], reverse=True)
    if named:
        found = [job for job in found if _status(job) in named]
    has_more = len(found) > limit
    found = found[:limit]
    if app.as_json:
        for job in found:
            render.json_line(job)
        return
    now = client.now()
    labeled = _LABELED if any(map(render.labels, found)) else ()
    rows = [
        [
            job["id"],
            *(render.labels(job) for _ in labeled),
            job["model"] or render.NOTHING,
            render.status(_status(job)),
            render.steps(job),
            render.clock(job["created_at"]),
            render.duration(_took_s(job, now)),
            render.one_line(job["error"] or job["problem"] or ""),
        ]
        for job in found
    ]
    headers = ["JOB", *labeled, "MODEL", "STATUS", ">STEP", "CREATED", ">TOOK", "ERROR"]
    is_narrow = bool(kinds or statuses or name or tags)
    empty = (
        "no job matches" if is_narrow or all_ else "no training yet; answers, too: warmd jobs --all"
    )
    render.print_table(headers, rows, empty=empty)
    if has_more and sys.stderr.isatty():
        note(f"only the newest {limit} are shown: see --limit")


def _kept_kinds() -> tuple[str, ...]:
    specs = {kind: spec_class(kind) for kind in KINDS}
    return tuple(kind for kind, spec in specs.items() if spec.queue == "train" or spec.is_kept)


def _took_s(job: dict[str, Any], now: float) -> float | None:
    if job["started_at"] is None:
        return None
    took: float = (job["ended_at"] or now) - job["started_at"]
    return took


@click.command()
@job_argument
@click.option(
    "--source",
    "has_source",
    is_flag=True,
    help="Show instead the code and the library versions that the job ran.",
)
@common_options
@click.pass_obj
def show(app: App, job: str | None, has_source: bool) -> None:
    """Show everything about JOB."""
    from ...daemon.client import control

    client = app.reader()
    job_id = client.find_any(job)
    if job_id.startswith(("sweep-", "curriculum-")):
        from .curriculum import show_curriculum
        from .sweep import show_sweep

        show_group = show_sweep if job_id.startswith("sweep-") else show_curriculum
        show_group(app, client, job_id)
        return
    if has_source:
        from .source import show_source

        show_source(app, client.rundir(job_id))
        return
    found = client.job(job_id)
    if app.as_json:
        render.json_line(found)
        return
    hidden = ("step", "paused", "rows_done", "rows_total")
    shown = {}
    for name, value in found.items():
        if value in (None, [], {}) or name in hidden:
            continue
        if name in _TIMES:
            shown[name.removesuffix("_at")] = render.moment(value)
        elif name == "steps_total":
            shown["step"] = render.steps(found)
        elif name == "status":
            shown[name] = render.status(_status(found))
        elif name == "seconds_per_step":
            shown["step time"] = render.duration(value)
        elif name == "eta_s":
            shown["eta"] = render.duration(value)
        elif name == "result":
            shown |= _summary(value)
        elif name == "missing_model":
            shown["waits for"] = f"a machine with {value}"
        elif name == "notes":
            shown |= {f"note {i}": _remark(note) for i, note in enumerate(value, 1)}
        else:
            text = line_of(value) if name == "needs" else value
            text = ", ".join(value) if isinstance(value, list) else text
            shown[name] = render.one_line(text)
    if found["rows_total"]:
        shown["records"] = f"{found['rows_done']}/{found['rows_total']}"
    if (took_s := _took_s(found, client.now())) is not None:
        shown["took"] = render.duration(took_s)
    with suppress(NotFound, Conflict):  # its files were removed by hand, or are damaged
        if changed := changed_options(client.rundir(job_id).read_spec()):
            shown["options"] = ", ".join(render.phrase(f"{n} {v}") for n, v in changed.items())
    render.print_fields(shown)
    if upgrades := control.upgrades(client.home):
        note(f"upgraded since the daemon started: {', '.join(upgrades)}: `warmd reload`")


def _remark(note: Mapping[str, Any]) -> str:
    return f"{render.moment(note['time'])}  {render.one_line(note['text'])}"


_TIMES = ("created_at", "enqueued_at", "scheduled_at", "started_at", "paused_at", "ended_at")


def changed_options(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of a job that are not the defaults of its kind, as text."""
    options = spec_class(document["kind"]).options() if document["kind"] in KINDS else {}
    return {
        name: render.one_line(", ".join(map(str, value)) if isinstance(value, list) else value)
        for name, value in document["spec"].items()
        if name != "model"
        and name in options
        and value != (list(d) if isinstance(d := options[name].default, tuple) else d)
    }


def _summary(result: Mapping[str, Any]) -> dict[str, str]:
    """A result in a few fields: the text of an answer, else its numbers."""
    if texts := answers_of(result):
        shown = {"answer": render.one_line(texts[0])}
        return shown | {f"answer {i}": render.one_line(t) for i, t in enumerate(texts[1:], 2)}
    values = [render.phrase(f"{k} {v}") for k, v in _flat(result) if "." not in k]
    return {"result": ", ".join(values)}


def answers_of(result: Mapping[str, Any]) -> list[str]:
    """Return the texts of an infer job's answer; none for a result of another kind."""
    choices = result.get("choices") or []
    return [choice["text"] for choice in choices if isinstance(choice.get("text"), str)]


@click.command()
@job_argument
@common_options
@click.pass_obj
def result(app: App, job: str | None) -> None:
    """Print the result of JOB.

    For an answer its text; for a training its evaluations and the metrics of the last step. --json
    has everything.
    """
    client = app.reader()
    job_id = client.find(job)
    values = client.result(job_id)
    if values is None:
        raise _no_result(app, client.job(job_id))
    if app.as_json:
        render.json_line(values)
    elif texts := answers_of(values):
        for text in texts:
            click.echo(render.printable(text) if sys.stdout.isatty() else text)
    else:
        render.print_fields(_result_fields(values))


def _result_fields(values: Mapping[str, Any]) -> dict[str, str]:
    """The values of a result, with the metrics of a training's last step as one field."""
    is_training = "steps" in values
    hidden = ("metrics", "weights") if is_training else ("weights",)
    fields = dict(_flat({n: v for n, v in values.items() if n not in hidden}))
    if is_training and (metrics := values.get("metrics")):
        shown = [render.phrase(f"{name} {value}") for name, value in _flat(metrics)]
        fields["last step"] = ", ".join(shown)
    return fields


def _no_result(app: App, job: dict[str, Any]) -> Exception:
    job_id, status = job["id"], _status(job)
    if status == "failed":
        return JobFailed(f"{job_id} failed: {job['error']}")
    if status in ("stopped", "canceled"):
        command = app.command(f"resume {job_id}")
        return Stopped(f"{job_id} was {status} and has no result; resume it with: {command}")
    return Conflict(
        f"{job_id} has no result yet ({status}, step {render.steps(job)}); "
        f"follow it with: {app.command(f'tail {job_id}')}"
    )


class Stopped(click.ClickException):
    """The job was stopped before it had a result."""

    exit_code = 4


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values as text; nested values get names like `metrics.loss`."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, render.number(value)
        elif value is not None:
            yield prefix + name, render.one_line(value)
