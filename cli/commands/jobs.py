"""Listing jobs: `queue` and `jobs`. Both work without a daemon."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import click
from click.core import ParameterSource

from ...configs.labels import line_of
from ...daemon.lifecycle.statuses import (
    ENDED,
    EVERY,
    PAUSABLE,
    PAUSED,
    PENDING,
    UNREGISTERED,
    WAITING,
    shown,
)
from ...jobs import KINDS
from ...jobs.errors import SpecError
from ..shared.app import App, common_options, note
from ..shared.names import model_names
from ..view import render

STATUSES = (*EVERY, PAUSED, UNREGISTERED)

# Words for statuses that `jobs --status` takes, too.
_WORDS = {
    "running": ("started",),
    "waiting": (*WAITING, PAUSED),
    "pending": (*WAITING, PAUSED),
    "ended": ENDED,
    "done": ("finished",),
    "completed": ("finished",),
    "succeeded": ("finished",),
    "error": ("failed",),
    "killed": ("stopped",),
    "cancelled": ("canceled",),
}

_LIMIT = 20

_GROUPS = frozenset(("sweep", "curriculum"))  # values of --kind that list groups, not jobs

_LABELED = ("NAME",)  # the column that a table has if one of its jobs has a name or tags


@click.command()
@common_options
@click.pass_obj
def queue(app: App) -> None:
    """Show running and waiting jobs, in queue order.

    A sweep is one line, with the steps of all its jobs.
    """
    from ...daemon.lifecycle.view import JobFilter

    client = app.reader()
    members = client.groups.sweep_members()
    jobs = client.jobs.all(JobFilter(statuses=PENDING, hidden=members))
    sweeps = client.groups.sweeps() if members else []
    jobs += [sweep for sweep in sweeps if sweep["status"] in PENDING]
    jobs.sort(key=_queue_order)
    if app.as_json:
        for job in jobs:
            render.json_line(job)
        return
    now = client.now()
    models = model_names(client, (job["model"] for job in jobs))
    labeled = _LABELED if any(map(render.labels, jobs)) else ()
    rows = [
        [
            render.NOTHING if job["position"] is None else str(job["position"]),
            job["id"],
            *(render.labels(job) for _ in labeled),
            job["queue"],
            models[job["model"]],
            render.status(shown(job)),
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
        PENDING.index(job["status"]),
        job["position"] or 0,
        job["created_at"],
    )


def _waits_for(job: dict[str, Any]) -> str:
    if job["paused"]:
        return "resume"
    if job["waits_for"]:
        return str(job["waits_for"])
    if job["status"] == "deferred":
        return ", ".join(job["after"])
    if job["status"] == "queued" and job["position"] is None:
        # It is set aside: no worker that could take it had these labels, and this model.
        missing = [f"a machine with {job['missing_model']}"] if job["missing_model"] else []
        missing += [job["awaited_nodes"]] if job["awaited_nodes"] else []
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
    type=click.Choice([*KINDS, *sorted(_GROUPS)]),
    help="Only jobs of this kind; sweep and curriculum list these as a whole. May be repeated.  "
    "[default: training kinds and eval]",
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
@click.option(
    "--best",
    metavar="DATASET",
    help="With --kind eval: all evaluations on DATASET (a file, a folder, a hub data set or "
    "arithmetic), best first, each compared with the best.",
)
@click.option(
    "--since",
    metavar="TIME",
    help="Instead of a list: what happened since 18:00 (the latest one), 2026-11-21 18:00, or for "
    "an age such as 12h. Results, failures, interruptions and their cost, expected ends.",
)
@click.option("--markdown", is_flag=True, help="With --since: print Markdown.")
@common_options
@click.pass_context
def jobs(
    ctx: click.Context,
    /,
    all_: bool,
    kinds: tuple[str, ...],
    statuses: tuple[str, ...],
    name: str | None,
    tags: tuple[str, ...],
    limit: int,
    best: str | None,
    since: str | None,
    markdown: bool,
) -> None:
    """List training jobs and evaluations, or summarize a period.

    The newest job comes first. A sweep is one line; `--tag SWEEP` lists its jobs. Evaluations at
    the gates of curricula are left out; `--kind eval` lists them. Works without a daemon.
    """
    app = ctx.ensure_object(App)
    if since is not None:
        from .digest import show_digest

        _refuse_others(ctx, "since", {"since", "markdown"})
        show_digest(app, since, markdown=markdown)
        return
    if markdown:
        raise SpecError("markdown", "must go with since")
    if best is not None:
        from .leaderboard import show_leaderboard

        if kinds != ("eval",):
            raise SpecError("best", "must go with kind eval")
        _refuse_others(ctx, "best", {"best", "kinds"})
        show_leaderboard(app, best)
        return
    if groups := _GROUPS.intersection(kinds):
        kind = min(groups)
        _refuse_others(ctx, f"kind {kind}", {"kinds", "limit"})
        if len(kinds) > 1:
            raise SpecError("kind", f"must be given once with {kind}")
        _list_groups(app, kind, limit)
        return
    _list_jobs(app, kinds, statuses, name, tags, limit, has_answers=all_)


def _list_jobs(
    app: App,
    kinds: tuple[str, ...],
    statuses: tuple[str, ...],
    name: str | None,
    tags: tuple[str, ...],
    limit: int,
    *,
    has_answers: bool,
) -> None:
    from ...daemon.lifecycle.view import JobFilter, listed_kinds

    named = {name for word in statuses for name in _WORDS.get(word, (word,))}
    wanted = {*named, *(PAUSABLE if PAUSED in named else ())}
    # Only the view of a job says whether it is paused; few jobs run or wait.
    first = None if wanted.intersection(PAUSABLE) else limit + 1
    of_kinds = kinds or (None if has_answers else listed_kinds())
    client = app.reader()
    # With a filter by name or tag, the jobs of a sweep are listed one by one.
    is_grouped = name is None and not tags
    hidden: list[str] = []
    if is_grouped:
        hidden += client.groups.sweep_members()
        if not kinds and not has_answers:
            hidden += client.groups.gate_jobs()
    found = client.jobs.all(
        JobFilter(
            statuses=wanted or None,
            limit=first,
            kinds=of_kinds,
            name=name,
            tags=tags,
            hidden=hidden,
        )
    )
    if is_grouped:
        sweeps = [
            one for one in client.groups.sweeps(limit + 1) if not kinds or one["kind"] in kinds
        ]
        found = sorted([*found, *sweeps], key=lambda job: job["created_at"], reverse=True)
    if named:
        found = [job for job in found if shown(job) in named]
    has_more = len(found) > limit
    found = found[:limit]
    if app.as_json:
        for job in found:
            render.json_line(job)
        return
    now = client.now()
    models = model_names(client, (job["model"] for job in found))
    labeled = _LABELED if any(map(render.labels, found)) else ()
    rows = [
        [
            job["id"],
            *(render.labels(job) for _ in labeled),
            models[job["model"]],
            render.status(shown(job)),
            render.steps(job),
            render.clock(job["created_at"]),
            render.duration(took_s(job, now)),
            render.one_line(job["error"] or job["problem"] or ""),
        ]
        for job in found
    ]
    headers = ["JOB", *labeled, "MODEL", "STATUS", ">STEP", "CREATED", ">TOOK", "ERROR"]
    is_narrow = bool(kinds or statuses or name or tags)
    empty = (
        "no job matches"
        if is_narrow or has_answers
        else "no training yet; answers, too: warmd jobs --all"
    )
    render.print_table(headers, rows, empty=empty)
    if has_more and sys.stderr.isatty():
        note(f"only the newest {limit} are shown: see --limit")


def _list_groups(app: App, kind: str, limit: int) -> None:
    from .curriculum import list_curricula
    from .sweep import list_sweeps

    (list_sweeps if kind == "sweep" else list_curricula)(app, limit)


def _refuse_others(ctx: click.Context, what: str, fitting: Collection[str]) -> None:
    """Raise SpecError for an option that is given and has no meaning together with `what`."""
    for parameter in ctx.command.params:
        name = parameter.name or ""
        is_fitting = name in fitting or not parameter.expose_value  # --home, --json and --debug
        if not is_fitting and ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            raise SpecError(parameter.opts[0].lstrip("-"), f"must not go with {what}")


def took_s(job: dict[str, Any], now: float) -> float | None:
    """How long a job has run in all its executions, or ran; None before its start."""
    if job["started_at"] is None:
        return None
    earlier: float = job["earlier_s"]
    if job["ended_at"] is None and job["status"] != "started":  # it waits
        return earlier
    return earlier + (job["ended_at"] or now) - float(job["started_at"])
