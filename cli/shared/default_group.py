"""A group of commands with a default subcommand."""

from __future__ import annotations

from typing import Any

import click

from . import suggest


class DefaultGroup(click.Group):
    """A group whose first argument, if it is no subcommand, is an argument of the default one.

    A word that is similar to a subcommand is a misspelt subcommand.
    """

    def __init__(self, *args: Any, default: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.default = default

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        is_option = word.startswith("-") and word != "-"
        is_misspelt = suggest.is_misspelt(word, self.commands)
        if word not in self.commands and not is_option and not is_misspelt:
            args = [self.default, *args]
        return super().resolve_command(ctx, args)
