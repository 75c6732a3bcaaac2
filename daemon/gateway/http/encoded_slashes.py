"""Paths whose segments may have an encoded slash, as names of jobs do: rates%2F1."""

from __future__ import annotations

from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

SLASH = "%2F"


class EncodedSlashes:
    """Keeps encoded slashes encoded, so that all that reads the path sees the same segments."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and SLASH.lower().encode() in scope["raw_path"].lower():
            segments = scope["raw_path"].decode("ascii", "replace").split("/")
            path = "/".join(unquote(segment).replace("/", SLASH) for segment in segments)
            scope = {**scope, "path": path}
        await self.app(scope, receive, send)
