"""Loaded models: `load` and `models`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..shared.app import App, common_options, note
from ..shared.given import GivenPath
from ..view import render


@click.command()
@click.argument("models", metavar="[NAME=]PATH...", nargs=-1, required=True)
@click.option(
    "--once",
    is_flag=True,
    help="Keep it only until the daemon stops; do not load it again at the next start.",
)
@click.option(
    "--response-template",
    type=GivenPath(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="How the model writes messages and calls tools: JSON of transformers' response_template.  "
    "[default: the tokenizer's own, else TRL's for the chat template]",
)
@common_options
@click.pass_obj
def load(app: App, models: tuple[str, ...], once: bool, response_template: Path | None) -> None:
    """Load models and keep them in memory.

    [NAME=]PATH[,dtype=…][,task=…][,precision=…][,response_template=…]: PATH is a folder or a hub
    id; the default NAME is the last part of PATH. The name of a configured or loaded model alone
    loads that model again, with its current files. Running jobs are not affected. Until
    `models --unload`, they are also loaded at every start of the daemon.
    """
    from ...configs.values import ConfigError
    from ...daemon.client import control
    from ..view.fetching import FetchProgress

    config = app.config()
    if response_template is not None and len(models) > 1:
        problem = f"must go with one model, got {len(models)}"
        raise ConfigError("response_template", problem)
    named = [control.named_model(config, model, FetchProgress()) for model in models]
    if response_template is not None:
        file = str(response_template.resolve())
        named = [replace(model, response_template=file) for model in named]
    loaded = [control.load_model(config, model, is_kept=not once) for model in named]
    if app.as_json:
        for model in loaded:
            render.json_line(model)
    else:
        print_models(loaded)
        every = control.models(config)
        for model in loaded:
            _note_differences(model)
            for other in every:
                if other["path"] == model["path"] and other["name"] != model["name"]:
                    note(f"{model['name']}: the same folder is also loaded as {other['name']}")


def _note_differences(model: dict[str, Any]) -> None:
    """Print how a loaded model differs from its files, and its tokenizer from the model."""
    from ...jobs.models.generation_settings import unapplied_words
    from ...jobs.models.pretrained_tokenizer import appended_end_words
    from ...jobs.models.weight_headers import listed

    for names, what in (
        (model["left_out"], "tensors of its files are not used"),
        (model["new_head"], "tensors of its head are new, with random values"),
        (model["unembedded"], "tokens of its tokenizer have no embedding: texts with them fail"),
    ):
        if names:
            note(f"{model['name']}: {len(names)} {what}: {listed(names)}")
    if model["appended_end"] is not None:
        note(f"{model['name']}: {appended_end_words(model['appended_end'])}")
    if model["unapplied"]:
        note(f"{model['name']}: {unapplied_words(model['unapplied'])}")
    if model["replaced_template"] is not None:
        file, other = model["response_template"], model["replaced_template"]
        note(f"{model['name']}: response template {file} is used instead of {other}")


@click.command()
@click.option(
    "--unload",
    metavar="NAME",
    help="Unload a model. Running jobs keep it until they end; the base of loaded adapters stays "
    "in memory until the last of them is unloaded.",
)
@common_options
@click.pass_obj
def models(app: App, unload: str | None) -> None:
    """List the loaded models, or unload one."""
    from ...daemon.client import control

    if unload is not None:
        _unload(app, unload)
        return
    found = control.models(app.config())
    if app.as_json:
        for model in found:
            render.json_line(model)
    else:
        print_models(found)


def _unload(app: App, name: str) -> None:
    from ...daemon.client import control

    unloaded = control.unload_model(app.config(), name)
    if app.as_json:
        render.json_line(unloaded)
    else:
        click.echo(f"{name} unloaded")
        if unloaded["kept_for"]:
            click.echo(
                f"its weights stay in memory for its adapters: {', '.join(unloaded['kept_for'])}",
                err=True,
            )


def print_models(found: list[dict[str, Any]]) -> None:
    """Print a table of loaded models."""
    has_adapters = any(map(_adapter, found))
    rows = [
        [
            render.model(model["name"]),
            model["dtype"],
            model["precision"],
            _count(model["parameters"]),
            render.size(model["bytes"]),
            render.duration(model["seconds"]),
            render.clock(model["loaded_at"]),
            *([_adapter(model)] if has_adapters else []),
            model["path"],
        ]
        for model in found
    ]
    headers = ["MODEL", "DTYPE", "PRECISION", ">PARAMS", ">SIZE", ">LOAD", "SINCE"]
    headers += ["ADAPTER", "PATH"] if has_adapters else ["PATH"]
    render.print_table(headers, rows)


def _adapter(model: dict[str, Any]) -> str:
    """The description of an adapter: its base and rank, or why it was merged; empty for a model."""
    rank = f"rank {model['rank']}" if model["rank"] is not None else ""
    if model["base"] is not None:
        return f"{rank} on {model['base']}"
    return f"merged: {model['merged']}" if model["merged"] is not None else ""


def _count(parameters: int) -> str:
    for unit, power in (("B", 9), ("M", 6), ("K", 3)):
        if parameters >= 10**power:
            return f"{parameters / 10**power:.3g}{unit}"
    return str(parameters)
