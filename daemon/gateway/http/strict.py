"""Routes whose JSON bodies are parsed by `bodies`, with its limits, instead of by FastAPI."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from ....jobs.errors import SpecError
from . import bodies


class ParsedRequest(Request):
    """A request with a parsed body: FastAPI receives the validated model as its JSON."""

    parsed: bodies.ParsedBody

    async def body(self) -> bytes:
        return b"" if self.parsed.value is None else b"read"

    async def json(self) -> Any:
        return self.parsed.value


class StrictRoute(APIRoute):
    """A route that accepts strict JSON only: no NaN, valid UTF-8, bounded depth and size.

    Unknown query parameters are refused, like unknown fields.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = {parameter.alias for parameter in self.dependant.query_params}
        model: Any = self.body_field.field_info.annotation if self.body_field else None

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
