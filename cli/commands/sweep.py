"""Sweeps: submitted, followed, and shown as one table of combinations and their scores."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ...daemon.lifecycle.statuses import ENDED
from ...jobs.intervals import interval_words
from ..shared.app import App, note
from ..shared.grouped import GroupedOption
from ..shared.groups import print_groups
from ..shared.names import names_of
from ..view import render

if TYPE_CHECKING:
    from ...daemon.client.client import Client
    from ...daemon.lifecycle.queueing import Queueing
    from ...daemon.runs.weights import Weights

_POLL_S = 0.5
_HINT = "`warmd submit KIND --sweep OPTION=VALUE,…` starts one"


def show_sweep(app: App, client: Client, sweep_id: str) -> None:
    """Print a sweep, as JSON if the command line says so."""
    found = client.groups.sweep(sweep_id)
    if app.as_json:
        render.json_line(found)
    else:
        print_sweep(client, found)


def list_sweeps(app: App, limit: int) -> None:
    """Print sweeps, newest first."""
    columns = {">JOBS": lambda one: str(one["jobs"]), ">STEP": render.steps}
    print_groups(app, app.reader().groups.sweeps(limit), columns, kind="sweep", hint=_HINT)


def print_sweep(client: Client, found: Mapping[str, Any]) -> None:
    """Print a sweep for people: its fields, then one row per combination.

    A score is the metric on held-out data, or its mean over the last tenth of the training steps.
    With several seeds: the mean over the seeds and its 95 % interval. A combination that was
    dropped early has the score of its last step.
    """
    statuses = ", ".join(f"{number} {status}" for status, number in found["statuses"].items())
    fields = {
        "id": found["id"],
        "name": render.labels(found) or render.NOTHING,
        "status": f"{render.status(found['status'])} ({statuses})",
        "step": render.steps(found),
        "metric": f"{found['metric']}, {'lower' if found['lower_is_better'] else 'higher'} is "
        "better",
    }
    if found["halving"]:
        rungs = ", ".join(map(str, found["rungs"]))
        fields["halving"] = f"the best 1/{found['halving']} continue; steps {rungs}"
    if found["search"]:
        done = sum(point["mean"] is not None for point in found["points"])
        search = found["search"]
        ranges = "; ".join(f"{name} {text}" for name, text in search["ranges"].items())
        fields["search"] = f"{search['sampler']}, {done} of {search['trials']} trials scored"
        fields["ranges"] = ranges or render.NOTHING
    if found["eta_s"] is not None:
        fields["eta of the running jobs"] = render.duration(found["eta_s"])
    render.print_fields(fields)
    click.echo()
    rows = [_row(found, index, point) for index, point in enumerate(found["points"])]
    headers = ["", "VALUES", ">JOBS", ">STEP", ">MEAN", "95 % INTERVAL", "STATUS"]
    render.print_table(headers, rows)
    best = found["best"]
    if best is not None:
        point = found["points"][best]
        click.echo()
        click.echo(f"best: {values_of(point)}  {found['metric']} {score_of(point)}")
        if point["low"] is None:
            click.echo("one seed for each: differences may be chance (--seeds 3)")
        names = names_of(client, [job["id"] for job in point["jobs"]])
        click.echo(f"jobs: {', '.join(names.values())}")


def _row(found: Mapping[str, Any], index: int, point: Mapping[str, Any]) -> list[str]:
    interval = None if point["low"] is None else interval_words(point["low"], point["high"])
    mean = point["mean"]
    return [
        "*" if index == found["best"] else "",
        values_of(point),
        f"{point['n']}/{len(point['jobs'])}",
        str(point["step"] or render.NOTHING),
        render.NOTHING if mean is None else render.number(mean),
        interval or render.NOTHING,
        _status(point),
    ]


def values_of(point: Mapping[str, Any]) -> str:
    """The values of a point: learning_rate 1e-05, lora 8."""
    words = (f"{name} {_value(value)}" for name, value in point["values"].items())
    return render.one_line(", ".join(words)) or "all"


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def score_of(point: Mapping[str, Any]) -> str:
    """The score of a point: 0.64 (0.558 to 0.722, 3 seeds)."""
    mean = render.number(point["mean"])
    if point["low"] is None:
        return mean
    interval = interval_words(point["low"], point["high"])
    return f"{mean} ({interval}, {point['n']} seeds)"


def _status(point: Mapping[str, Any]) -> str:
    if point["dropped_at"] is not None:
        return f"not continued after step {point['dropped_at']}"
    statuses = [str(job["status"]) for job in point["jobs"]]
    counts = {status: statuses.count(status) for status in dict.fromkeys(statuses)}
    if len(counts) == 1:
        return statuses[0]
    return ", ".join(f"{number} {status}" for status, number in counts.items())


def sweep_options() -> list[click.Option]:
    """The options that turn one submission into several jobs."""
    return [
        GroupedOption(
            ["--sweep"],
            heading="Sweep",
            multiple=True,
            metavar="OPTION=VALUE,…",
            help="Values of an option to compare. May be repeated: all combinations of the values "
            "are trained. With --search also a range, such as 1e-6..1e-3:log.  [default: one job]",
        ),
        GroupedOption(
            ["--seeds"],
            heading="Sweep",
            metavar="N",
            help="Number of jobs per combination, with seeds --seed, --seed + 1, …  [default: 1]",
        ),
        GroupedOption(
            ["--array"],
            heading="Sweep",
            metavar="N",
            help="Number of jobs with seeds --seed, --seed + 1, …; {index} in text options is "
            "replaced by 0, 1, …  [default: one job]",
        ),
        GroupedOption(
            ["--halving"],
            heading="Sweep",
            metavar="N",
            help="Successive halving: train all combinations for a fraction of the steps, "
            "continue the best 1/N of them up to N times as many steps, and so on.  [default: "
            "train all to the end]",
        ),
        GroupedOption(
            ["--search"],
            heading="Sweep",
            type=click.Choice(["optuna"]),
            help="Search algorithm that chooses the values of each trial from the scores of "
            "earlier trials; needs pip install 'warmd[optuna]'.  [default: all combinations]",
        ),
        GroupedOption(
            ["--trials"],
            heading="Sweep",
            metavar="N",
            help="Number of combinations that --search tries.  [default: 20]",
        ),
        GroupedOption(
            ["--parallel"],
            heading="Sweep",
            metavar="N",
            help="Number of combinations that --search tries at the same time.  [default: the "
            "number of training workers]",
        ),
        GroupedOption(
            ["--metric"],
            heading="Sweep",
            metavar="NAME",
            help="Metric by which combinations are compared: eval_NAME on held-out data, or the "
            "mean of NAME over the last tenth of the training steps.  [default: reward or loss, "
            "on held-out data if there is some]",
        ),
    ]


def submit_sweep(
    app: App,
    kind: str,
    values: Mapping[str, Any],
    varied: Mapping[str, Any],
    queueing: Queueing,
    init: Weights | None,
    *,
    dry_run: bool,
    wait: bool,
) -> int:
    """Submit a sweep, or show what would be submitted; return the exit code."""
    client = app.client()
    if dry_run:
        from ...daemon.client import sweep_plans

        plan, state = sweep_plans.plan(client.jobs, kind, values, varied, queueing, init=init)
        members = [member.changes for member in state.members]
        search = plan.search
        count = search.trials * plan.seeds if search else len(members)
        planned = {
            "kind": kind,
            "jobs": count,
            "search": None if search is None else asdict(search),
            "points": state.points,
            "seeds": plan.seeds,
            "metric": plan.metric,
            "rungs": plan.rungs,
            "options": plan.document["spec"],
            "first_prompt": client.jobs.first_prompt(kind, plan.document),
            "changes": members,
        }
        if app.as_json:
            render.json_line(planned)
            return 0
        click.echo(f"# {kind}: these {count} jobs would be queued")
        steps = f"steps {', '.join(map(str, plan.rungs))}" if plan.rungs else "their ends"
        click.echo(f"# metric: {plan.metric}; compared at {steps}")
        if planned["first_prompt"] is not None:
            click.echo(f"# first prompt: {render.quoted(planned['first_prompt'])}")
        if search:
            varied_by = {**plan.axes, **{name: one.text for name, one in search.ranges.items()}}
            click.echo(f"# {search.trials} trials, {search.parallel} at once, of")
            click.echo(values_of({"values": varied_by}))
        for point in state.points:
            click.echo(values_of({"values": point}))
        return 0
    sweep_id = client.groups.submit_sweep(kind, values, varied, queueing, init=init)
    if app.as_json:
        render.json_line(client.groups.sweep(sweep_id))
    else:
        click.echo(sweep_id)
    if wait:
        return follow(app, client, sweep_id)
    if sys.stderr.isatty():
        note(f"See: {app.command(f'show {sweep_id}')}")
    return 0


def follow(app: App, client: Client, sweep_id: str) -> int:
    """Report the progress of a sweep until it ends; return 0, or 1 or 4 as for a job."""
    shown = ""
    while True:
        found = client.groups.sweep(sweep_id)
        statuses = ", ".join(f"{number} {status}" for status, number in found["statuses"].items())
        line = f"step {render.steps(found)}  {statuses}"
        if line != shown:
            note(f"{time.strftime('%H:%M:%S')}  {line}")
            shown = line
        if found["status"] in ENDED:
            break
        time.sleep(_POLL_S)
    if not app.as_json:
        print_sweep(client, found)
    return {"finished": 0, "failed": 1}.get(str(found["status"]), 4)
