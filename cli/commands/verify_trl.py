"""`warmd checkpoints verify --trl`: a job's first steps with TRL's trainer and with warmd's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..shared.app import App, note
from ..view import render
from ..view.live import ClockLine, has_live_lines

if TYPE_CHECKING:
    from ...daemon.reports.verify_trl import Verdict

TRL_STEPS = 3  # steps that are trained where --steps is not given
MOST_TRL_STEPS = 10_000
_HEADERS = (">STEP", ">LOSS TRL", ">LOSS WARMD", ">GRAD NORM TRL", ">GRAD NORM WARMD")


def verify_trl(app: App, job: str | None, steps: int) -> int:
    """Compare both sides and print the verdict; return the exit code."""
    from ...daemon.reports.verify_trl import verify

    client = app.client()
    job_id = client.find(job, is_training=True)
    with ClockLine(enabled=has_live_lines()) as line:
        verdict = verify(client, job_id, steps=steps, report=line.show if line.enabled else note)
    if app.as_json:
        render.json_line(_to_json(job_id, verdict))
    else:
        for words in verdict.changed:
            note(words)
        render.print_table(_HEADERS, [_cells(step) for step in verdict.steps])
        click.echo(_weights(verdict.weights))
        click.echo(_sentence(job_id, verdict))
    return 0 if verdict.is_equal else 1


def _to_json(job_id: str, verdict: Verdict) -> dict[str, Any]:
    return {
        "id": job_id,
        "kind": verdict.kind,
        "trl": verdict.trl,
        "equal": verdict.is_equal,
        "steps": verdict.steps,
        "weights": verdict.weights,
        "differences": verdict.differences,
        "changed": verdict.changed,
    }


def _cells(step: dict[str, Any]) -> list[str]:
    sides = step["trl"], step["warmd"]
    return [
        str(step["step"]),
        *(f"{side[name]:.7g}" for name in ("loss", "grad_norm") for side in sides),
    ]


def _weights(found: dict[str, Any]) -> str:
    words = f"largest difference of a weight: {found['largest_difference']:.3g}"
    if found["relative"] is None:
        return f"{words}; no weight was changed"
    beyond, count = found["beyond_rounding"], found["weights"]
    return (
        f"{words}, {found['relative']:.3g} of the largest change ({found['largest_change']:.3g}); "
        f"beyond rounding: {beyond:,} of {count:,} weights"
    )


def _sentence(job_id: str, verdict: Verdict) -> str:
    steps = f"{len(verdict.steps)} step{'s' if len(verdict.steps) > 1 else ''}"
    if verdict.is_equal:
        state = click.style("equal within rounding", fg="green")
        return f"{job_id}: {steps} of TRL {verdict.trl} and warmd are {state}"
    state = click.style("differ", fg="red")
    what = "; ".join(verdict.differences)
    return f"{job_id}: {steps} of TRL {verdict.trl} and warmd {state}: {what}"
