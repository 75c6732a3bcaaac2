"""Options that are made from a kind's spec, and options that name a source of options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ...jobs import spec_class
from ...jobs.errors import SpecError
from ...jobs.spec import GROUPS, OptionInfo
from .given import GivenPath
from .grouped import GroupedOption
from .job_argument import complete_job

ARGUMENT = "argument"


def argument_of(info: OptionInfo) -> click.Argument:
    """The argument that may be given in place of an option."""
    return click.Argument([ARGUMENT], required=False, metavar=f"[{info.name.upper()}]")


def take_argument(name: str, given: dict[str, Any], argument: str | None) -> None:
    """Use the argument as the value of its option. Raises SpecError when both are given."""
    if argument is not None:
        if given[name] is not None:
            raise SpecError(name, "must be given once, got it as argument and as option")
        given[name] = argument


def spec_option(info: OptionInfo) -> click.Option:
    """The option of the command line for an option of a kind."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        return [choice for choice in info.choices or () if choice.startswith(incomplete)]

    flag = "--" + info.name.replace("_", "-")
    heading = GROUPS[info.group]
    if info.type is bool:
        flag += "/--no-" + info.name.replace("_", "-")
        return GroupedOption([flag, info.name], heading=heading, default=None, help=_help(info))
    return GroupedOption(
        [flag, info.name],
        type=str,  # for every type: `Spec.parse` converts it
        multiple=info.many,
        shell_complete=complete,
        metavar={int: "N", float: "X", str: "TEXT"}[info.type],
        help=_help(info),
        heading=heading,
        hidden=info.former is not None,
    )


def _help(info: OptionInfo) -> str:
    """Help, the accepted values if they say more than the type, relations, and the default."""
    notes = []
    if info.choices or info.minimum is not None or info.above is not None:
        notes.append(info.takes)
    if info.many:
        notes.append("may be repeated")
    notes += info.relations
    notes.append(f"default: {info.default_text or _shown(info.default)}")
    return f"{info.help}  [{'; '.join(notes)}]"


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(default) or "none"
    if isinstance(default, bool) or default is None:
        return str(default).lower()
    return repr(default) if "\n" in str(default) else str(default) or "none"


INIT_FROM = GroupedOption(
    ["--init-from"],
    heading=GROUPS["model"],
    metavar="JOB[@STEP]",
    shell_complete=complete_job,
    help="Initial weights: the final model of JOB, or its checkpoint at STEP. -: the latest job "
    "that trained a model of this type.",
)


def file_options() -> list[click.Option]:
    """The options --config and --set."""
    return [
        GroupedOption(
            ["--config", "config_file"],
            type=GivenPath(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="YAML file with options; options on the command line take precedence.",
        ),
        GroupedOption(
            ["--set", "settings"],
            multiple=True,
            metavar="KEY=VALUE",
            help="Value of one option; takes precedence over --config. May be repeated.",
        ),
    ]


def origin_options(kind: str) -> list[click.Option]:
    """The options that take options from elsewhere; for a training also the initial weights."""
    options = [
        *file_options(),
        GroupedOption(
            ["--like"],
            metavar="JOB",
            shell_complete=complete_job,
            help="Job whose options are copied. Options given in any other way take precedence.",
        ),
    ]
    return [INIT_FROM, *options] if spec_class(kind).takes_weights else options
