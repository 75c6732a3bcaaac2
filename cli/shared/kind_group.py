"""A group of commands with one subcommand for each job kind."""

from __future__ import annotations

from abc import abstractmethod

import click

from ...jobs import KINDS, spec_class


class KindGroup(click.Group):
    """One subcommand per job kind, made from its spec on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(KINDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name == LIKE:
            return self.like_command()
        return self.kind_command(name) if name in KINDS else None

    @abstractmethod
    def kind_command(self, kind: str) -> click.Command:
        """Make the subcommand of a kind."""

    @abstractmethod
    def like_command(self) -> click.Command:
        """Make the subcommand for `--like JOB` without a KIND."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Without a KIND, --like gives it.
        is_like = any(arg.partition("=")[0] == "--like" for arg in args)
        if is_like and not {*args[:1]} & KINDS.keys():
            args = [LIKE, *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in (*KINDS, LIKE) and not args[0].startswith("-"):
            spec_class(args[0])  # raises NotFound with the kinds there are
        return super().resolve_command(ctx, args)


LIKE = "like"  # the command for `submit --like JOB`, which no list shows
