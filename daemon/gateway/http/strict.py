"""Routes whose JSON bodies are parsed by `bodies`, with its limits, instead of by FastAPI."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, get_origin, get_type_hints

from fastapi import Request, params
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from ....jobs.errors import SpecError
from . import bodies


class ParsedRequest(Request):
    """A request with a parsed body: FastAPI receives the validated model as its JSON."""

    parsed: bodies.ParsedBody

    async def body(self) -> bytes:
        return b"" if self.parsed.value is None else b"read"

    async def json(self) -> Any:
        return self.parsed.value


def accepted(endpoint: Callable[..., Any], path: str) -> tuple[set[str], Any]:
    """Return the names of a route's query parameters, and the model of its body (None: no body)."""
    hints = get_type_hints(endpoint, include_extras=True)
    del hints["return"]
    names = {name for name, hint in hints.items() if _is_query(hint) and f"{{{name}}}" not in path}
    return names, next(filter(_is_model, hints.values()), None)


def _is_query(hint: Any) -> bool:
    """Whether a parameter with this type hint is of the query, if its name is not in the path."""
    if get_origin(hint) is Annotated:
        return any(isinstance(one, params.Query) for one in hint.__metadata__)
    return not _is_model(hint) and hint is not Request


def _is_model(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


class StrictRoute(APIRoute):
    """A route that accepts strict JSON only: no NaN, valid UTF-8, bounded depth and size.

    Unknown query parameters are refused, like unknown fields.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known, model = accepted(self.endpoint, self.path)

        async def handle_strictly(request: Request) -> Response:
            for name in request.query_params:
                if name not in known:
                    raise SpecError(name[:80], "unknown or not supported")
            if model is None:
                return await handle(request)
            read = ParsedRequest(request.scope, request.receive)
            read.parsed = await bodies.read(
                request, model, request.app.state.warmd.in_parser_thread
            )
            return await handle(read)

        return handle_strictly
