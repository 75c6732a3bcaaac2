"""Who may come in and with how much: plain ASGI, before anything of a request is read."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....configs.values import is_loopback
from .bodies import SMALL, Room, Share
from .errors import ApiError

LARGEST_BODY = 64 * 1024**2  # bytes of a request, images in it included
LARGEST_TEXT = 8 * 1024**2  # bytes of a request without images
LARGEST_FILE = 1024**3  # bytes of an uploaded file
LINGER_S = 10  # to hear out who sends more than that
SILENCE_S = 30  # in the middle of a body, after which nobody waits for the rest
SLOWEST = 16 * 1024  # bytes a second of a body, after SILENCE_S
FILES = "/v1/files"
OPEN = ("/health",)  # for whoever watches over the machine and has no token
SHARE = "warmd.share"  # in the scope: the room that the request's body takes
_IMAGE = b"data:image"  # what a body with images has in it
_HEARD_OUT_AT_ONCE = 8
_AT_A_TURN = 4
_NETLOC = re.compile(r"(?:\[([0-9a-f:.]{2,45})\]|([a-z0-9_.-]{1,253}))(?::[0-9]{0,5})?", re.ASCII)


class Guard:
    """Lets in requests that carry the token, or, where there is none, that come from this host.

    Without a token any web page that a person looks at could send requests here: those carry the
    page's own name as Origin or, after a trick with the page's DNS, as Host, and are refused.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, host: str) -> None:
        self.app = app
        self.token = token
        self.host = host
        self._room = Room()
        self._hearing_out = asyncio.Semaphore(_HEARD_OUT_AT_ONCE)
        self._turns = _Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        error = self._objection(scope, headers)
        if error is not None:
            await error.response(scope, receive, send)
            return
        share = Share(self._room)
        if scope["path"] == FILES:  # written to the disk in chunks, never held in memory
            body = _Body(receive, send, LARGEST_FILE, None, self._hearing_out, self._turns)
        else:
            body = _Body(receive, send, LARGEST_BODY, share, self._hearing_out, self._turns)
        length = headers.get("content-length", "")
        if scope["path"] not in OPEN:
            await self._turns.wait()
        if int(length or 0) > body.limit:
            await body.too_large().response(scope, body.receive, body.send)
            return
        try:
            scope[SHARE] = share
            await self.app(scope, body.receive, body.send)
        finally:
            share.shrink(0)

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
        # Not by a parser of URLs: of user@host it would see the host alone.
        found = _NETLOC.fullmatch(netloc.lower())
        name = (found[1] or found[2]) if found is not None else ""
        return name == self.host or is_loopback(name)


class _Turns:
    """Lets a few go on at each turn of the event loop.

    Hundreds of requests or pieces at once would make a turn as long as all of them take, and
    /health, which needs several turns, wait for them each time.
    """

    def __init__(self) -> None:
        self._few = asyncio.Semaphore(_AT_A_TURN)

    async def wait(self) -> None:
        async with self._few:
            await asyncio.sleep(0)


class _Body:
    """A request's body, refused where it is beyond the limit, and the answer to it."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        limit: int,
        share: Share | None,
        hearing_out: asyncio.Semaphore,
        turns: _Turns,
    ) -> None:
        """`share`: of the memory for bodies; None for a body that does not stay in memory."""
        self._receive = receive
        self._send = send
        self._share = share
        self._hearing_out = hearing_out
        self._turns = turns
        self._began = asyncio.get_running_loop().time()
        self._tail = b""
        self._has_image = False
        self.limit = limit  # bytes
        self.received = 0
        self.is_whole = False
        self.is_refused = False

    def too_large(self) -> ApiError:
        """Return the error of a body beyond the limit."""
        problem = f"a request must be at most {self.limit // 1024**2} MiB"
        if self.received <= self.limit and self._is_long_text():
            problem = f"a request without images must be at most {LARGEST_TEXT // 1024**2} MiB"
        return self._refused(ApiError(413, problem))

    def _refused(self, error: ApiError) -> ApiError:
        self.is_refused = True
        error.headers["connection"] = "close"
        return error

    async def receive(self) -> Message:
        if self.is_whole:  # what comes now is that the client has gone, one day
            return await self._receive()
        message = await self._receive_in_time()
        piece = message.get("body", b"")
        self.is_whole = not message.get("more_body", False)
        self.received += len(piece)
        if self.received > SMALL:
            await self._turns.wait()
        self._look_for_image(piece)
        if self.received > self.limit or self._is_long_text():
            raise _through(self.too_large())
        if self._share is not None:
            try:
                await self._share.grow(self.received)
            except ApiError as error:
                raise _through(self._refused(error)) from None
        return message

    async def _receive_in_time(self) -> Message:
        now = asyncio.get_running_loop().time()
        latest = self._began + SILENCE_S + self.received / SLOWEST
        try:
            async with asyncio.timeout(min(SILENCE_S, max(0.0, latest - now))):
                return await self._receive()
        except TimeoutError:
            problem = (
                f"a body must come within {SILENCE_S} s, a larger one at {SLOWEST // 1024} KiB/s"
            )
            raise HTTPException(408, problem, {"connection": "close"}) from None

    def _look_for_image(self, piece: bytes) -> None:
        if self._share is not None and not self._has_image:
            seen = self._tail + piece
            self._has_image = _IMAGE in seen
            self._tail = seen[-len(_IMAGE) :]

    def _is_long_text(self) -> bool:
        return self._share is not None and not self._has_image and self.received > LARGEST_TEXT

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
            async with asyncio.timeout(LINGER_S), self._hearing_out:
                while (await self._receive()).get("more_body", False):
                    await self._turns.wait()


def _through(error: ApiError) -> HTTPException:
    """Return an error of the class that FastAPI hands through from where it reads a form."""
    return HTTPException(error.status, str(error), error.headers)
