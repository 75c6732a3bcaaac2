"""Who may come in and with how much: plain ASGI, before anything of a request is read."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...configs.values import is_loopback
from .errors import ApiError

LARGEST_BODY = 64 * 1024**2  # bytes of a request, images in it included
LARGEST_FILE = 1024**3  # bytes of an uploaded file
LINGER_S = 10  # to hear out who sends more than that
SILENCE_S = 30  # in the middle of a body, after which nobody waits for the rest
FILES = "/v1/files"
OPEN = ("/health",)  # for whoever watches over the machine and has no token


class Guard:
    """Lets in requests that carry the token, or, where there is none, that come from this host.

    Without a token any web page that a person looks at could send requests here: those carry the
    page's own name as Origin or, after a trick with the page's DNS, as Host, and are refused.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, host: str) -> None:
        self.app = app
        self.token = token
        self.host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        error = self._objection(scope, headers)
        if error is not None:
            await error.response(scope, receive, send)
            return
        body = _Body(receive, send, LARGEST_FILE if scope["path"] == FILES else LARGEST_BODY)
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > body.limit:
            await body.refuse().response(scope, body.receive, body.send)
            return
        await self.app(scope, body.receive, body.send)

    def _objection(self, scope: Scope, headers: Headers) -> ApiError | None:
        if self.token is None:
            if not self._is_ours(headers.get("host", "")):
                return ApiError(403, "Host must name this machine where no token is set")
            origin = headers.get("origin")
            if origin is not None and not self._is_ours(origin.partition("://")[2]):
                return ApiError(403, "requests of web pages need a token: set http_token")
        elif scope["path"] not in OPEN and not self._has_token(headers):
            return ApiError(
                401,
                "a bearer token must come with the request: the daemon's http_token",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return None

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        assert self.token is not None
        is_right = hmac.compare_digest(given.strip().encode(), self.token.encode())
        return scheme.lower() == "bearer" and is_right

    def _is_ours(self, netloc: str) -> bool:
        try:
            name = urlsplit(f"//{netloc}").hostname or ""
        except ValueError:
            return False
        return name == self.host or is_loopback(name)


class _Body:
    """A request's body, refused where it is beyond the limit, and the answer to it."""

    def __init__(self, receive: Receive, send: Send, limit: int) -> None:
        self._receive = receive
        self._send = send
        self.limit = limit  # bytes
        self.received = 0
        self.is_whole = False
        self.is_refused = False

    def refuse(self) -> ApiError:
        """Return the error of a body beyond the limit."""
        self.is_refused = True
        return ApiError(
            413,
            f"a request must be at most {self.limit // 1024**2} MiB",
            headers={"connection": "close"},
        )

    async def receive(self) -> Message:
        if self.is_whole:  # what comes now is that the client has gone, one day
            return await self._receive()
        try:
            async with asyncio.timeout(SILENCE_S):
                message = await self._receive()
        except TimeoutError:
            problem = f"nothing came for {SILENCE_S} s in the middle of the request"
            raise HTTPException(408, problem, {"connection": "close"}) from None
        self.is_whole = not message.get("more_body", False)
        self.received += len(message.get("body", b""))
        if self.received > self.limit:
            # Of a class that FastAPI hands through from where it reads the body.
            error = self.refuse()
            raise HTTPException(error.status, str(error), error.headers)
        return message

    async def send(self, message: Message) -> None:
        if self.is_refused and message["type"] == "http.response.body":
            # To close a connection with bytes unread resets it, and the answer that still waits
            # at the client is lost: it is closed when the client has hung up or sent all.
            await self._send({**message, "more_body": True})
            await self._drain()
            message = {"type": "http.response.body"}
        await self._send(message)

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await self._receive()).get("more_body", False):
                    pass
