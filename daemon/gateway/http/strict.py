"""Bodies that are read as the rest of warmd reads JSON."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from . import bodies


class ReadRequest(Request):
    """A request whose body was read: FastAPI is handed the model that it would make of it."""

    taken: bodies.Taken

    async def body(self) -> bytes:
        return b"" if self.taken.value is None else b"read"

    async def json(self) -> Any:
        return self.taken.value


class StrictRoute(APIRoute):
    """A route whose JSON has no NaN, no half characters, bounded depth and bounded size."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model = self.body_field.field_info.annotation
        assert isinstance(model, type)

        async def handle_strictly(request: Request) -> Response:
            read = ReadRequest(request.scope, request.receive)
            read.taken = await bodies.take(request, model, request.app.state.gate.taking_apart)
            return await handle(read)

        return handle_strictly
