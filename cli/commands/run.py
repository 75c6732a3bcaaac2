"""`warmd run`: completes one prompt and streams the text."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ...jobs import spec_class
from ...jobs.errors import SpecError
from ..shared.app import App, common_options
from ..shared.option_values import gathered
from ..shared.spec_options import file_options, spec_option, take_argument
from ..view import render
from .answer import show

_LEFT_OUT = ("input", "output", "n")  # only for `submit infer`
_OPTIONS = {n: o for n, o in spec_class("infer").options().items() if n not in _LEFT_OUT}


def _run(
    config_file: Path | None, settings: tuple[str, ...], words: tuple[str, ...], **given: Any
) -> int:
    """Complete PROMPT and stream the text.

    MODEL: a loaded one. Without PROMPT, stdin is the prompt. Ctrl-C cancels. Exit code: 0 finished,
    1 failed, 4 stopped.
    """
    app = click.get_current_context().ensure_object(App)
    client = app.client()
    if len(words) > 1:
        take_argument("model", given, _model_of(app, client.models.names(), words))
    take_argument("prompt", given, words[-1] if words else None)
    if given["prompt"] is None and given["messages"] is None:
        if sys.stdin.isatty():
            raise SpecError("prompt", "must be given as an argument or on stdin")
        given["prompt"] = sys.stdin.read()
    values = gathered(app, "infer", given, config_file, settings)
    job_id = client.jobs.submit(spec_class("infer").parse(values))
    if app.as_json:
        return _print_result(client, job_id)
    return show(client, job_id)[1]


def _model_of(app: App, names: Sequence[str], words: Sequence[str]) -> str:
    """Return the model of the words MODEL PROMPT. Raises SpecError unless it is loaded."""
    model = words[0]
    if len(words) == 2 and model in names:
        return model
    shown = [render.one_line(shlex.quote(text)) for text in (*words[:2], " ".join(words))]
    raise SpecError(
        "prompt",
        f"must be one argument, or follow a loaded model ({', '.join(names) or 'none'}): "
        f"`{app.command(f'run --model {shown[0]} {shown[1]}')}` or "
        f"`{app.command(f'run {shown[2]}')}`",
    )


def _print_result(client: Any, job_id: str) -> int:
    from .watch import EXIT_CODES

    for _ in client.jobs.follow(job_id):
        pass
    job = client.jobs.get(job_id)
    render.json_line(job)
    return EXIT_CODES.get(job["status"], 0)


run = common_options(
    click.command(
        "run",
        params=[
            click.Argument(["words"], nargs=-1, metavar="[MODEL] [PROMPT]"),
            *(spec_option(info) for info in _OPTIONS.values()),
            *file_options(),
        ],
    )(_run)
)
