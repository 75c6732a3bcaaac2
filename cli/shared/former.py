"""Commands that earlier versions had: each is answered with the command line that replaces it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence

import click

from .app import App

_Change = Callable[[list[str]], list[str]]


def _to(*words: str) -> _Change:
    return lambda arguments: [*words, *arguments]


def _digest(arguments: list[str]) -> list[str]:
    has_since = any(word.partition("=")[0] == "--since" for word in arguments)
    return ["jobs", *([] if has_since else ["--since", "12h"]), *arguments]


def _group(kind: str) -> _Change:
    def change(arguments: list[str]) -> list[str]:
        match arguments:
            case ["show", name, *rest] if not name.startswith("-"):
                return ["show", name, *rest]
            case ["show" | "list", *rest]:
                return ["jobs", "--kind", kind, *rest]
        return ["jobs", "--kind", kind, *arguments]

    return change


def _note(arguments: list[str]) -> list[str]:
    match arguments:
        case [job, text, *rest] if not text.startswith("-"):
            return ["show", job, "--note", text, *rest]
    return ["show", *arguments]


# For each removed command, the function that turns its arguments into the new command line.
COMMANDS: Mapping[str, _Change] = {
    "clean": _to("rm"),
    "curriculum": _group("curriculum"),
    "digest": _digest,
    "drain": _to("nodes", "--drain"),
    "estimate": lambda arguments: ["submit", *(arguments or ["KIND"]), "--dry-run"],
    "kill": _to("cancel", "--now"),
    "leaderboard": _to("jobs", "--kind", "eval", "--best"),
    "note": _note,
    "notify": lambda arguments: ["doctor", "--notify", *arguments[1:]],
    "sweep": _group("sweep"),
    "unload": _to("models", "--unload"),
    "unpause": _to("resume"),
    "verify-resume": _to("checkpoints", "verify", "--resume"),
}


class Replaced(click.ClickException):
    """A removed command was typed. The message has the command line that replaces it."""

    exit_code = 2  # bad usage

    def __init__(self, app: App, name: str, arguments: Sequence[str]) -> None:
        """`name` and `arguments`: the removed command and the words typed after it."""
        instead = app.command(shlex.join(COMMANDS[name](list(arguments))))
        super().__init__(f"{name!r} is no longer a command; type: {instead}")
