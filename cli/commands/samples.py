"""`warmd samples`: completions that a GRPO job was trained on, whole, with their rewards."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import click

from ...jobs.errors import NotFound, SpecError
from ..shared.app import App, common_options
from ..shared.job_argument import job_argument
from ..view import render

_INDENT = 12  # the longest role, "environment", and a space


@click.command()
@job_argument
@click.option(
    "--step",
    type=click.IntRange(min=1, max=10**9),
    metavar="N",
    help="Step of the training.  [default: the latest]",
)
@click.option(
    "--task",
    "--row",
    "row",
    type=click.IntRange(min=0, max=10**12),
    metavar="N",
    help="Row of the data, or task of an environment: its completions or episodes, in all steps "
    "that are kept.",
)
@click.option(
    "--grep",
    "text",
    metavar="TEXT",
    help="Text in completions, in upper or lower case, in all steps that are kept.",
)
@click.option(
    "--worst",
    type=click.IntRange(min=1, max=10**6),
    metavar="N",
    help="Number of completions with the lowest rewards.  [default: all]",
)
@click.option(
    "--best",
    type=click.IntRange(min=1, max=10**6),
    metavar="N",
    help="Number of completions with the highest rewards.  [default: all]",
)
@common_options
@click.pass_obj
def samples(
    app: App,
    job: str | None,
    step: int | None,
    row: int | None,
    text: str | None,
    worst: int | None,
    best: int | None,
) -> None:
    """Show completions or episodes on which GRPO JOB was trained, with their rewards.

    Without --step, --row and --grep: those of its latest step. All completions of some steps are
    kept: see `submit grpo --log-completions`. Needs no daemon.
    """
    from ...daemon.runs import completions

    if worst is not None and best is not None:
        raise SpecError("best", "must not be given together with worst")
    client = app.reader()
    job_id = client.find(job, is_training=True)
    wanted = completions.Wanted(step=step, row=row, text=text, worst=worst, best=best)
    found = wanted.select(completions.read(client.rundir(job_id)))
    if not found:
        by_reward = worst is not None or best is not None
        raise NotFound(_missing(job_id, step, row, text, by_reward=by_reward))
    if app.as_json:
        for one in found:
            render.json_line({"job": job_id, **one})
        return
    click.secho(f"{job_id}  {_summary(found)}", bold=True)
    for line in completion_lines(found, width=render.columns(sys.stdout)):
        click.echo(line)


def _missing(
    job_id: str, step: int | None, row: int | None, text: str | None, *, by_reward: bool
) -> str:
    """Why no completion is shown; `by_reward`: those without one are left out."""
    of_reward = " with a reward" if by_reward else ""
    if text is not None:
        return f"grep: no completion of {job_id}{of_reward} that is kept has {text[:80]!r}"
    if row is not None:
        return f"row: {job_id} has kept no completion of row {row}{of_reward}"
    of_step = "" if step is None else f" of step {step}"
    return (
        f"step: {job_id} has kept no completions{of_step}{of_reward}; --log-completions says which "
        "it keeps"
    )


def _summary(found: Sequence[Mapping[str, Any]]) -> str:
    """What is shown: `step 40: 8 completions, mean reward 0.41`."""
    steps = sorted({one["step"] for one in found})
    words = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps"
    noun = "episode" if "turns" in found[0] else "completion"
    number = f"{len(found)} {noun}" + ("s" if len(found) > 1 else "")
    known = [one["reward"] for one in found if one["reward"] is not None]
    mean = f", mean reward {render.number(sum(known) / len(known))}" if known else ""
    return f"{words}: {number}{mean}"


def completion_lines(found: Sequence[Mapping[str, Any]], *, width: int) -> list[str]:
    """Return completions below their prompts, whole, with rewards; prompts are not repeated."""
    lines: list[str] = []
    for (step, prompt, answer), of_prompt in groupby(
        found, key=lambda one: (one.get("step"), one["prompt"], one.get("answer"))
    ):
        lines += ["", *_texts("prompt", prompt, width=width)]
        if answer is not None:
            lines += _texts("answer", answer, width=width)
        for one in of_prompt:
            lines.append(_about(one, step))
            if "turns" in one:
                lines += _turns(one, width=width)
            else:
                lines += _texts("", one["completion"], width=width)
    return lines


def _turns(episode: Mapping[str, Any], *, width: int) -> list[str]:
    """What the policy and others wrote, in turn; all but the policy's is dim."""
    lines: list[str] = []
    for turn in episode["turns"]:
        if turn["role"] != "assistant":
            texts = _texts(turn["role"], turn["content"], width=width)
            lines += [click.style(line, dim=True) for line in texts]
            continue
        lines += _texts("policy", turn["content"], width=width)
        if turn.get("reward"):
            lines[-1] += click.style(f"  reward {render.number(turn['reward'])}", fg="cyan")
    if episode.get("error"):
        lines += [click.style(line, fg="red") for line in _texts("", episode["error"], width=width)]
    return lines


def _texts(name: str, text: str, *, width: int) -> list[str]:
    """A text with its line breaks, indented; `name` stands before its first line."""
    lines = [
        part
        for line in render.printable(text).splitlines() or [""]
        for part in render.wrapped(" " * _INDENT + line, width=width, indent=_INDENT)
    ]
    return [f"{name:<{_INDENT}}{lines[0][_INDENT:]}", *lines[1:]]


def _about(one: Mapping[str, Any], step: int | None) -> str:
    """The line above a completion: `reward 1.2 (correctness 1, general 0.2)  …`."""
    parts = {n: render.number(v) for n, v in (one.get("rewards") or {}).items() if v is not None}
    named = ", ".join(f"{name} {value}" for name, value in parts.items())
    total = one.get("reward")
    words = [] if step is None else [f"step {step}"]
    if total is None:
        words.append(f"reward {named}" if named else "no reward")
    else:
        words.append(f"reward {render.number(total)}" + (f" ({named})" if len(parts) > 1 else ""))
    if one.get("advantage") is not None:
        words.append(f"advantage {render.number(one['advantage'])}")
    if one.get("tokens") is not None:
        cut = ", cut at the length" if one["stop"] == "length" else ""
        words.append(f"{one['tokens']} tokens{cut}")
    if "turns" in one:
        turns = sum(turn["role"] == "assistant" for turn in one["turns"])
        words.append(f"{one['stop']} after {turns} turn" + ("s" if turns != 1 else ""))
        if one.get("success") is not None:
            words.append("success" if one["success"] else "no success")
    if one.get("replayed"):
        words.append("replayed")
    return click.style("  ".join(words), fg="cyan")
