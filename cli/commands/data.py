"""`warmd data show|clear`: the content of a data set, and the cached tokens of data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ..shared.app import App, common_options, note
from ..shared.default_group import DefaultGroup
from ..view import render

_BAR = 30  # columns of the longest bar of a histogram
_LONGEST_CELL = 300  # characters of an example's column


@click.group(cls=DefaultGroup, default="show", subcommand_metavar="show|clear [OPTIONS]...")
@common_options
def data() -> None:
    """Inspect a data set, or clear the token cache.

    `warmd data DATASET` is `warmd data show DATASET`.
    """


@data.command()
@click.argument("dataset")
@click.option(
    "--model",
    metavar="NAME",
    help="Model whose tokenizer measures lengths.  [default: none; lengths in characters]",
)
@click.option(
    "--columns",
    multiple=True,
    metavar="FIELD=COLUMN,...",
    help="Column names of the dataset, where they differ from the usual ones. May be repeated.",
)
@common_options
@click.pass_obj
def show(app: App, dataset: str, model: str | None, columns: tuple[str, ...]) -> None:
    """Show columns, lengths and examples of DATASET, and which job kinds can use it.

    DATASET is a file, a folder or a hub data set, as for `warmd submit --dataset`. For each kind,
    the records are read with the default options: USABLE and BAD count them. Needs no daemon.
    """
    from ...daemon.client.data import survey_of

    found = survey_of(app.config(), dataset, columns, model)
    if app.as_json:
        render.json_line(found)
        return
    click.echo(
        f"{found['dataset']}: {found['rows']:,} rows, "
        f"{render.size(found['bytes'])} in {found['files']} file(s)\n"
    )
    if found["left_out"] is not None:
        click.echo(f"left out: {render.one_line(found['left_out'])}\n")
    if found["splits"] is not None:
        click.echo(f"{render.one_line(found['splits'])}\n")
    columns_found = found["columns"].items()
    rows = [[name, ", ".join(types), f"{sum(types.values()):,}"] for name, types in columns_found]
    render.print_table(["COLUMN", "TYPE", ">ROWS"], rows, empty="no columns")
    click.echo()
    unit = found["unit"]
    headers = ["KIND", ">USABLE", ">BAD", "READS", f">MEAN {unit.upper()}", ">LONGEST", ">OVER"]
    render.print_table(headers, [_usage(kind, use) for kind, use in found["kinds"].items()])
    for kind, use in found["kinds"].items():
        if use["first_fault"] is not None:
            click.echo(f"{kind}: first bad row: {render.one_line(use['first_fault'])}")
        if use["warning"] is not None:
            click.echo(f"{kind}: {render.one_line(use['warning'])}")
    for kind, use in found["kinds"].items():
        if use["histogram"]:
            click.echo(f"\nrows by {unit} ({kind})")
            _print_histogram(use["histogram"])
    for number, example in enumerate(found["examples"], 1):
        click.echo(f"\nrow {number}")
        if example:
            render.print_fields({name: _cell(value) for name, value in example.items()})


def _usage(kind: str, use: Mapping[str, Any]) -> list[str]:
    limit = use["max_length"]
    over = render.NOTHING if limit is None else f"{use['truncated']:,} over {limit:,}"
    is_usable = use["usable"] > 0
    return [
        kind,
        f"{use['usable']:,}",
        f"{use['bad']:,}",
        ", ".join(use["fields"]) or render.NOTHING,
        f"{use['mean']:.0f}" if is_usable else render.NOTHING,
        f"{use['longest']:,}" if is_usable else render.NOTHING,
        over if is_usable else render.NOTHING,
    ]


def _print_histogram(histogram: Mapping[str, int]) -> None:
    most = max(histogram.values())
    for name, count in histogram.items():
        bar = "█" * max(round(_BAR * count / most), 1)
        click.echo(f"{name:>7}  {bar} {count:,}")


def _cell(value: Any) -> str:
    import orjson

    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    text = render.one_line(text)
    return text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 1] + "…"


@data.command()
@common_options
@click.pass_obj
def clear(app: App) -> None:
    """Remove the cached tokens of all data sets.

    Running jobs are not affected. Later jobs tokenize their data sets again.
    """
    from ...daemon.client.data import clear_tokens

    freed = clear_tokens(app.config())
    if app.as_json:
        render.json_line({"bytes": freed})
    else:
        note(f"freed {render.size(freed)}" if freed else "nothing to remove")
