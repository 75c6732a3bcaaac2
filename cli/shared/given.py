"""Values of the command line that are refused before a command begins: empty names and paths.

`""` is nearly always an unset variable of a script. As a path it would be the current folder, and
as a name it would match by chance, or mean the default.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from ...jobs.errors import SpecError
from .grouped import GroupedOption

# Text of the user that may be empty: prompts, messages, templates, notes.
_TEXTS = frozenset(("argument", "prompt", "prompts", "messages", "system", "template", "text"))
_PARSED = frozenset(("since",))  # refused where they are parsed, with the accepted values


class GivenPath(click.Path):
    """A path; an empty one, which click takes for the current folder, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            raise SpecError(_name(param), "must be a path, got ''")
        return super().convert(value, param, ctx)


def refusing_empty(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function of a command: it raises SpecError for an argument or option that is ''."""

    @wraps(function)
    def wrapper(*args: Any, **values: Any) -> Any:
        parameters = {p.name: p for p in click.get_current_context().command.params}
        for name, value in values.items():
            parameter = parameters.get(name)
            is_allowed = name in _TEXTS | _PARSED or _is_label(parameter)
            if _is_empty(value) and not is_allowed:
                raise SpecError(_name(parameter), "must be a value that is not empty, got ''")
        return function(*args, **values)

    return wrapper


def _is_label(parameter: click.Parameter | None) -> bool:
    """Whether it is a label of a job to submit: `Labels` reports the exact requirement."""
    return isinstance(parameter, GroupedOption) and parameter.name in ("name", "tags")


def _is_empty(value: Any) -> bool:
    return value == "" or (isinstance(value, tuple) and "" in value)


def _name(parameter: click.Parameter | None) -> str:
    """The name of an option as it is typed, or of an argument."""
    if parameter is None or parameter.name is None:
        return "value"
    if isinstance(parameter, click.Argument):
        return parameter.name
    return parameter.opts[0].lstrip("-").replace("-", "_")
