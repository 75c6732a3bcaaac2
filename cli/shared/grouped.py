"""Options that `--help` lists under headings."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import click


class GroupedOption(click.Option):
    """An option that `--help` lists under the heading of its group."""

    def __init__(self, *args: Any, heading: str = "Queueing", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


def label_options(heading: str = "Queueing") -> list[click.Option]:
    """The options that name a job, and tag it."""
    return [
        GroupedOption(
            ["--name"],
            heading=heading,
            metavar="NAME",
            help="Name of the job; commands accept it in place of the id.  [default: none]",
        ),
        GroupedOption(
            ["--tag", "tags"],
            heading=heading,
            multiple=True,
            metavar="TAG",
            help="Tag of the job; `warmd jobs --tag TAG` lists the jobs that have it. May be "
            "repeated.  [default: none]",
        ),
    ]


class GroupedCommand(click.Command):
    """A command whose `--help` lists its options by group, in the order of its parameters."""

    def __init__(
        self, *args: Any, not_supported: Mapping[str, str] = MappingProxyType({}), **kwargs: Any
    ) -> None:
        """`not_supported`: names of options that users look for here, and what to know instead."""
        super().__init__(*args, **kwargs)
        self.not_supported = not_supported

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                heading = getattr(parameter, "heading", "Other options")
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)
