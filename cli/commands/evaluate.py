"""`warmd eval MODEL…`: an eval job per model, the later ones compared with the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...jobs import spec_class
from ...jobs.errors import Conflict, NotFound, SpecError
from ...jobs.eval.summary import count_words
from ...jobs.intervals import interval_words
from ..shared.app import EXIT_INTERRUPTED, App, common_options, note
from ..shared.grouped import label_options
from ..shared.option_values import gathered
from ..shared.spec_options import file_options, spec_option
from ..view import render
from .watch import EXIT_CODES, wait

if TYPE_CHECKING:
    from ...daemon.client.client import Client
    from ...daemon.runs.weights import Weights

_KIND = "eval"
_OPTIONS = {n: o for n, o in spec_class(_KIND).options().items() if n != "model"}


def _evaluate(
    models: tuple[str, ...],
    config_file: Path | None,
    settings: tuple[str, ...],
    name: str | None,
    tags: tuple[str, ...],
    **given: Any,
) -> int:
    """Evaluate MODELs on a data set and compare them.

    A MODEL is a warm model, a finished job, JOB@STEP, the folder of a model or an adapter, or a hub
    id. Each MODEL is evaluated by a job of its own, and each after the first is compared with the
    first, question by question. Ctrl-C leaves the jobs running. Exit code: 0 finished, 1 failed,
    4 stopped.
    """
    from ...daemon.lifecycle.queueing import Queueing

    app = click.get_current_context().ensure_object(App)
    client = app.client()
    queueing = Queueing(name=name, tags=tags)
    values = gathered(app, _KIND, given, config_file, settings)
    if not models:
        models = (str(values.pop("model", "demo")),)
    if name is not None and len(models) > 1:
        raise SpecError("name", f"must go with one model, got {len(models)}: --tag marks them all")
    if len(set(models)) < len(models):
        raise SpecError("model", f"must be given once each, got {' '.join(models)}")
    named = [_model(client, text) for text in models]
    for model, init in named:  # all of them before the first is queued
        client.jobs.check(spec_class(_KIND).parse({**values, "model": model}), init=init)
    jobs: list[str] = []
    for model, init in named:
        against = jobs[0] if jobs and values.get("against") is None else values.get("against")
        spec = spec_class(_KIND).parse({**values, "model": model, "against": against})
        jobs.append(client.jobs.submit(spec, init=init, queueing=queueing))
    try:
        statuses = [wait(client, job_id) for job_id in jobs]
    except KeyboardInterrupt:
        note(f"{' '.join(jobs)} continue. Their results: {app.command(f'result {jobs[-1]}')}")
        return EXIT_INTERRUPTED
    found = [client.jobs.get(job_id) for job_id in jobs]
    if app.as_json:
        for job in found:
            result = job["result"] or {"model": job["model"]}
            render.json_line({"job": job["id"], "status": job["status"], **result})
    else:
        _print(client, found)
    return max(EXIT_CODES.get(status, 0) for status in statuses)


def _model(client: Client, text: str) -> tuple[str, Weights | None]:
    """The name of a model, and the weights of a checkpoint. Raises SpecError and NotFound."""
    if "@" not in text:
        return text, None
    init = client.models.weights(text)
    return init.name, init


def _print(client: Client, jobs: Sequence[Mapping[str, Any]]) -> None:
    finished = [job for job in jobs if job["result"] is not None]
    for job in jobs:
        if job["result"] is None:
            reason = render.one_line(job["error"] or "no reason given")
            note(f"{job['id']}: {job['model']}: {job['status']}: {reason}")
    rows = [
        [
            render.one_line(job["result"]["model"]),
            name,
            f"{metric['value']:.4g}",
            interval_words(metric["low"], metric["high"]),
            count_words(metric["n"], metric.get("unscored", 0), metric.get("completions", 0)),
            job["id"],
        ]
        for job in finished
        for name, metric in job["result"]["metrics"].items()
    ]
    render.print_table(["MODEL", "METRIC", ">VALUE", "95 % INTERVAL", ">N", "JOB"], rows)
    for job in finished:
        for line in comparison_lines(job["result"], _other_model(client, job["result"])):
            click.echo(line)
    if finished:
        path = client.rundir(finished[-1]["id"]).path / finished[-1]["result"]["report"]
        note(f"Report: {path}")


def _other_model(client: Client, result: Mapping[str, Any]) -> str | None:
    """Return the model of the evaluation that a result is compared with, if it is known."""
    with suppress(NotFound, Conflict):  # its files were removed since
        if result.get("against") is not None:
            return str(client.jobs.get(result["against"])["model"])
    return None


def comparison_lines(result: Mapping[str, Any], other: str | None = None) -> list[str]:
    """Return the comparison of a result in words, a line for each metric.

    `other`: the model of the other evaluation; None: the evaluation's id is shown.
    """
    lines = []
    against = result.get("against") if other is None else render.one_line(other)
    if other == result["model"]:
        against = f"{against} ({result.get('against')})"
    for name, found in (result["comparison"] or {}).items():
        p = "" if found["p"] is None else f", p {found['p']:.3g}"
        lines.append(
            f"{render.one_line(result['model'])} against {against}: {name} "
            f"{found['difference']:+.4g} "
            f"({interval_words(found['low'], found['high'], '+.4g')}; "
            f"{found['gained']} better, {found['lost']} worse{p}): {found['words']}"
        )
    return lines


eval = common_options(
    click.command(
        _KIND,
        params=[
            click.Argument(["models"], metavar="[MODEL]...", nargs=-1),
            *map(spec_option, _OPTIONS.values()),
            *label_options(),
            *file_options(),
        ],
    )(_evaluate)
)
