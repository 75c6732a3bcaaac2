"""Everything about one job: `show` and `result`. Both work without a daemon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ...configs.labels import line_of
from ...daemon.lifecycle import statuses
from ...jobs import KINDS, spec_class
from ...jobs.errors import Conflict, JobFailed, NotFound
from ..shared.app import App, common_options, note
from ..shared.job_argument import job_argument
from ..view import render
from .jobs import took_s

if TYPE_CHECKING:
    from ...daemon.runs.rundir import RunDir

_TIMES = ("created_at", "enqueued_at", "scheduled_at", "started_at", "paused_at", "ended_at")


@click.command()
@job_argument
@click.option(
    "--source",
    "has_source",
    is_flag=True,
    help="Show instead the code and the library versions that the job ran.",
)
@click.option("--note", "text", metavar="TEXT", help="Add a note to the job first.")
@common_options
@click.pass_obj
def show(app: App, job: str | None, has_source: bool, text: str | None) -> None:
    """Show everything about JOB.

    JOB can also be a sweep or a curriculum. Notes have no effect on a job.
    """
    from ...daemon.client import control

    client = app.reader()
    if text is not None:
        client.jobs.add_note(client.find(job), text)
    job_id = client.groups.find_any(job)
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
    found = client.jobs.get(job_id)
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
            shown[name] = render.status(statuses.shown(found))
        elif name == "seconds_per_step":
            shown["step time"] = render.duration(value)
        elif name == "eta_s":
            shown["eta"] = render.duration(value)
        elif name == "result":
            shown |= _summary(value) | _evaluations(value)
        elif name == "missing_model":
            shown["waits for"] = f"a machine with {value}"
        elif name == "awaited_nodes":
            shown["waits for"] = value
        elif name == "waits_for":
            shown["waits for"] = render.one_line(value)
        elif name == "notes":
            shown |= {f"note {i}": _remark(note) for i, note in enumerate(value, 1)}
        else:
            text = line_of(value) if name == "needs" else value
            text = ", ".join(value) if isinstance(value, list) else text
            shown[name] = render.one_line(text)
    if found["rows_total"]:
        shown["records"] = f"{found['rows_done']}/{found['rows_total']}"
    if (took := took_s(found, client.now())) is not None:
        shown["took"] = render.duration(took)
    with suppress(NotFound, Conflict):  # its files were removed by hand, or are damaged
        rundir = client.rundir(job_id)
        if changed := changed_options(rundir.read_spec()):
            shown["options"] = ", ".join(render.phrase(f"{n} {v}") for n, v in changed.items())
        if (begin := _begin(rundir)) is not None:
            shown |= _effective(found["kind"], begin)
        if (trained := rundir.path / "model").is_dir():
            shown["trained"] = render.one_line(str(trained))
            if getattr(spec_class(found["kind"]), "trains", None) == "decoder":
                run = app.command(f"run --model {job_id} PROMPT")
                shown["use"] = f"{run}, or model={job_id} over HTTP"
    render.print_fields(shown)
    if upgrades := control.upgrades(client.home):
        note(f"upgraded since the daemon started: {', '.join(upgrades)}: `warmd reload`")


def _remark(note: Mapping[str, Any]) -> str:
    return f"{render.moment(note['time'])}  {render.one_line(note['text'])}"


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


def _begin(rundir: RunDir) -> dict[str, Any] | None:
    """Return the `begin` event of the latest execution."""
    from ...daemon.runs import events

    found = None
    for event in events.read(rundir.events):
        if event["type"] == "begin":
            found = event
    return found


def _effective(kind: str, begin: Mapping[str, Any]) -> dict[str, str]:
    """The effective values of options, also of those with a computed default; the first prompt."""
    options = spec_class(kind).options() if kind in KINDS else {}
    found = {
        name: value
        for name, value in begin.items()
        if name in options and name != "model" and isinstance(value, int | float | str)
    }
    shown = {}
    if found:
        shown["in effect"] = ", ".join(render.phrase(f"{k} {v}") for k, v in _flat(found))
    if (prompt := begin.get("first_prompt")) is not None:
        shown["first prompt"] = render.quoted(prompt)
    return shown


def _summary(result: Mapping[str, Any]) -> dict[str, str]:
    """A result in a few fields: the text of an answer, else its numbers."""
    if texts := answers_of(result):
        shown = {"answer": render.one_line(texts[0])}
        return shown | {f"answer {i}": render.one_line(t) for i, t in enumerate(texts[1:], 2)}
    values = [render.phrase(f"{k} {v}") for k, v in _flat(result) if "." not in k]
    return {"result": ", ".join(values)}


def _evaluations(result: Mapping[str, Any]) -> dict[str, str]:
    """The evaluations before and after a training, each as one field."""
    found = {"evaluated before": result.get("eval_before"), "after": result.get("eval_after")}
    return {
        name: ", ".join(render.phrase(f"{k} {v}") for k, v in _flat(values))
        for name, values in found.items()
        if isinstance(values, dict)
    }


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
    values = client.jobs.result(job_id)
    if values is None:
        raise _no_result(app, client.jobs.get(job_id))
    if app.as_json:
        render.json_line(values)
    elif texts := answers_of(values):
        for text in texts:
            click.echo(text)
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
    job_id, status = job["id"], statuses.shown(job)
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
