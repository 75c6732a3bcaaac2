"""`warmd checkpoints verify --resume`: verifies exact resume after a kill on a job of the user."""

from __future__ import annotations

import click

from ..shared.app import App, note
from ..view import render

RESUME_STEPS = 4  # steps that are run where --steps is not given


def _on_a_gpu(is_deterministic: bool) -> str:
    """Explain a difference between two runs on a GPU."""
    if not is_deterministic:
        return "the state is restored exactly, but without --deterministic GPU kernels are not"
    return "bit-exact training on a GPU needs the same GPU model, driver and libraries in each run"


def verify_resume(app: App, job: str | None, steps: int) -> int:
    """Verify that a job can be interrupted and resumed with the same results; return an exit code.

    Runs its first steps twice, in two temporary jobs at the front of the queue: one without
    interruption, one with a stop and a kill -9 at a random moment. Then compares all results bit by
    bit.
    """
    from ...daemon.reports.verify_resume import verify

    client = app.client()
    job_id = client.find(job, is_training=True)
    verdict = verify(client, job_id, steps=steps, report=note)
    if app.as_json:
        render.json_line(
            {
                "id": job_id,
                "exact": verdict.is_exact,
                "steps": verdict.steps,
                "killed_at_step": verdict.killed_at_step,
                "resumed_from": verdict.resumed_from,
                "device": verdict.device,
                "differences": {f.what: f.difference for f in verdict.findings},
            }
        )
    else:
        equal = click.style("equal", fg="green")
        different = click.style("different", fg="red")
        rows = [
            [f.what, equal if f.difference is None else different, f.difference or ""]
            for f in verdict.findings
        ]
        render.print_table(["COMPARED", "VERDICT", "FIRST DIFFERENCE"], rows)
        click.echo(
            f"{job_id}: the resume {'is exact' if verdict.is_exact else 'is not exact'} (killed "
            f"after step {verdict.killed_at_step}, resumed from {verdict.resumed_from}, compared "
            f"at step {verdict.steps}, on {verdict.device})"
        )
        if not verdict.is_exact and verdict.device != "cpu":
            note(_on_a_gpu(verdict.deterministic))
    return 0 if verdict.is_exact else 1
