"""Routes that read queries strictly, and whose JSON bodies are parsed by `bodies`."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from fastapi import Request, params
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import QueryParams

from ....jobs.errors import SpecError
from . import bodies

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")  # as JSON writes it; pydantic takes "+5" and "1_0" too
_SHOWN = 80  # characters of a name or a value in an error


class ParsedRequest(Request):
    """A request with a parsed body: FastAPI receives the validated model as its JSON."""

    parsed: bodies.ParsedBody

    async def body(self) -> bytes:
        return b"" if self.parsed.value is None else b"read"

    async def json(self) -> Any:
        return self.parsed.value


def accepted(endpoint: Callable[..., Any], path: str) -> tuple[dict[str, Any], Any]:
    """Return the types of a route's query parameters, and the model of its body (None: no body)."""
    hints = get_type_hints(endpoint, include_extras=True)
    del hints["return"]
    query = {
        name: get_args(hint)[0] if get_origin(hint) is Annotated else hint
        for name, hint in hints.items()
        if _is_query(hint) and f"{{{name}}}" not in path
    }
    return query, next(filter(_is_model, hints.values()), None)


def check_query(given: QueryParams, known: dict[str, Any]) -> None:
    """Raise SpecError for a parameter that is unknown, is given twice, or is not an integer."""
    for name, value in given.multi_items():
        if name not in known:
            raise SpecError(name[:_SHOWN], "unknown or not supported")
        kind = known[name]
        if get_origin(kind) is not list and len(given.getlist(name)) > 1:
            raise SpecError(name, "must be given once")
        is_integer = kind is int or int in get_args(kind)
        if is_integer and not _INTEGER.fullmatch(value):
            raise SpecError(name, f"must be an integer, got {value[:_SHOWN]!r}")


def place_after(ids: list[str], after: str) -> int:
    """Return where a page begins that follows the item `after`. Raises SpecError if it is gone."""
    if after not in ids:
        raise SpecError("after", f"must be an id of this list, got {after[:_SHOWN]!r}")
    return ids.index(after) + 1


def _is_query(hint: Any) -> bool:
    """Whether a parameter with this type hint is of the query, if its name is not in the path."""
    if get_origin(hint) is Annotated:
        return any(isinstance(one, params.Query) for one in hint.__metadata__)
    return not _is_model(hint) and hint is not Request


def _is_model(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


class StrictRoute(APIRoute):
    """A route that accepts strict JSON only: no NaN, valid UTF-8, bounded depth and size.

    Query parameters that are unknown or repeated are refused, like unknown fields.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known, model = accepted(self.endpoint, self.path)

        async def handle_strictly(request: Request) -> Response:
            check_query(request.query_params, known)
            if model is None:
                return await handle(request)
            read = ParsedRequest(request.scope, request.receive)
            read.parsed = await bodies.read(
                request, model, request.app.state.warmd.in_parser_thread
            )
            return await handle(read)

        return handle_strictly
