"""Curricula: submitted, followed, and shown with their stages and the decisions at the gates."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

import click

from ...jobs.intervals import interval_words
from ..shared.app import EXIT_INTERRUPTED, App, note
from ..shared.groups import print_groups
from ..view import render

if TYPE_CHECKING:
    from ...daemon.client.client import Client
    from ...daemon.lifecycle.queueing import Queueing
    from ...daemon.runs.weights import Weights

_POLL_S = 0.5
_EXIT_CODES = {"finished": 0, "failed": 1}
_HINT = "a job file with `stages` starts one"
_ENDED = ("finished", "failed", "canceled")


def list_curricula(app: App, limit: int) -> None:
    """Print curricula, newest first."""
    columns = {"STAGE": lambda one: str(one["attempts"][-1]["stage"])}
    print_groups(app, app.reader().groups.curricula(limit), columns, kind="curriculum", hint=_HINT)


def show_curriculum(app: App, client: Client, curriculum_id: str) -> None:
    """Print a curriculum, as JSON if the command line says so."""
    found = client.groups.curriculum(curriculum_id)
    if app.as_json:
        render.json_line(found)
    else:
        print_curriculum(found)


def print_curriculum(found: Mapping[str, Any]) -> None:
    """Print a curriculum for people: its fields, then one row per attempt."""
    fields = {
        "id": found["id"],
        "name": render.labels(found) or render.NOTHING,
        "status": render.status(str(found["status"])),
        "stages": ", ".join(found["stages"]),
    }
    if found["problem"]:
        fields["problem"] = render.one_line(found["problem"])
    if found["model"]:
        fields["model"] = f"{found['model']} (the latest that passed a gate)"
    render.print_fields(fields)
    click.echo()
    rows = [
        [
            attempt["stage"] + (f" ({attempt['attempt']})" if attempt["attempt"] > 1 else ""),
            attempt["job"],
            render.status(str(attempt["status"])),
            render.steps(attempt),
            attempt["decision"] or _pending(attempt),
            comparison_words(attempt["comparison"]),
        ]
        for attempt in found["attempts"]
    ]
    render.print_table(["STAGE", "JOB", "STATUS", ">STEP", "DECISION", "COMPARISON"], rows)


def _pending(attempt: Mapping[str, Any]) -> str:
    if attempt["questions"]:
        return f"evaluating on {attempt['questions']} questions"
    return render.NOTHING


def comparison_words(found: Mapping[str, Any] | None) -> str:
    """The comparison at a gate in words: reward +0.12 (+0.05 to +0.19, n 200, p 0.001): better."""
    if not found:
        return ""
    p = "" if found["p"] is None else f", p {found['p']:.3g}"
    return (
        f"{found['metric']} {found['difference']:+.4g} "
        f"({interval_words(found['low'], found['high'], '+.4g')}, n {found['n']}{p}): "
        f"{found['words']}"
    )


def submit_curriculum(
    app: App,
    kind: str,
    values: Mapping[str, Any],
    given: Mapping[str, Any],
    queueing: Queueing,
    init: Weights | None,
    *,
    dry_run: bool,
    wait: bool,
) -> int:
    """Submit a curriculum, or show what would be trained; return the exit code."""
    from ...daemon.client import curriculum_plans
    from ...daemon.groups.stage_options import KEYS
    from ...jobs.errors import SpecError

    for name in (name for name in given if name not in KEYS):
        raise SpecError(name, "must not be given together with stages")
    client = app.client()
    if dry_run:
        plan, _ = curriculum_plans.plan(client.jobs, kind, values, given, queueing, init=init)
        stages = [
            {
                "name": stage.name,
                "gate": stage.has_gate,
                "options": stage.document["spec"],
                "first_prompt": client.jobs.first_prompt(kind, stage.document),
            }
            for stage in plan.stages
        ]
        if app.as_json:
            render.json_line({"kind": kind, "stages": stages, "gate": plan.gate})
            return 0
        click.echo(f"# {kind}: these {len(stages)} stages would be trained")
        for stage, shown in zip(plan.stages, stages, strict=True):
            click.echo(f"{stage.name}{'' if stage.has_gate and plan.gate else '  (no gate)'}")
            if (prompt := shown["first_prompt"]) is not None:
                click.echo(f"# first prompt: {render.quoted(prompt)}")
        return 0
    curriculum_id = client.groups.submit_curriculum(kind, values, given, queueing, init=init)
    if app.as_json:
        render.json_line(client.groups.curriculum(curriculum_id))
    else:
        click.echo(curriculum_id)
    if wait:
        return follow_curriculum(app, client, curriculum_id)
    if sys.stderr.isatty():
        note(f"Follow it with: {app.command(f'tail {curriculum_id}')}")
    return 0


def follow_curriculum(
    app: App,
    client: Client,
    curriculum_id: str,
    follow: Callable[[App, Client, str, TextIO], int] | None = None,
) -> int:
    """Follow a curriculum from stage to stage until it ends; return the exit code of its end.

    `follow`: shows the events of a job until it ends; None: only the decisions are shown.
    """
    shown: set[str] = set()
    decided = 0
    try:
        while True:
            found = client.groups.curriculum(curriculum_id)
            for attempt in found["attempts"]:
                if attempt["job"] not in shown and attempt["status"] != "removed":
                    shown.add(attempt["job"])
                    _show_event(app, {"type": "stage", **attempt})
                    if follow is not None:
                        follow(app, client, attempt["job"], sys.stdout)
            for attempt in found["attempts"][decided:]:
                if attempt["decision"] is not None:
                    decided += 1
                    _show_event(app, {"type": "gate", **attempt})
            if found["status"] in _ENDED:
                break
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        note(f"{curriculum_id} continues. See: {app.command(f'show {curriculum_id}')}")
        return EXIT_INTERRUPTED
    return _EXIT_CODES.get(str(found["status"]), 4)


def _show_event(app: App, event: Mapping[str, Any]) -> None:
    if app.as_json:
        render.json_line(event)
        return
    words = f"{event['type']} {event['stage']}"
    if event["attempt"] > 1:
        words += f" (attempt {event['attempt']})"
    if event["type"] == "gate":
        words += f": {event['decision']}  {comparison_words(event['comparison'])}"
    else:
        words += f": {event['job']}"
    click.echo(f"{time.strftime('%H:%M:%S')}  {words.rstrip()}")
