"""Authorization and body limits: ASGI middleware that runs before a request is parsed."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....configs.values import is_loopback
from . import session
from .bodies import SMALL, BodyMemory, Reservation
from .connection import AUTHORIZED
from .errors import ApiError
from .turns import Turns

MAX_BODY = 64 * 1024**2  # bytes of a request with images
MAX_TEXT = 8 * 1024**2  # bytes of a request without images
MAX_FILE = 1024**3  # bytes of an uploaded file
MAX_OPEN = 4 * 1024  # bytes of a request without token, where one is set
LINGER_S = 10  # for reading the rest of a body that is too large
SILENCE_S = 30  # without data before a body is given up
SLOWEST = 16 * 1024  # bytes per second of a body, on average over SILENCE_S
WRONG_S = 1.0  # before a wrong token is refused
FILES = "/v1/files"
OPEN = ("/health", "/livez", "/readyz")  # paths without token
OWN = "/v1/warmd/"  # prefix of warmd's own routes
LOGIN = f"{OWN}login"
PAGE = "/page/"  # prefix of the dashboard's files
_READING = ("GET", "HEAD", "OPTIONS")
_CHANGING = ("POST", "DELETE")  # no route has another method
RESERVATION = "warmd.reservation"  # key in the ASGI scope: the Reservation of the body
_IMAGE = b"data:image"  # marks a body with images
_MAX_DRAINS = 8  # bodies that are drained at a time
_MAX_READING = 4  # requests that only read at a time, of clients with token and of others
_MAX_PER_LOOP = 4  # requests or pieces of bodies per event loop iteration
_NETLOC = re.compile(r"(?:\[([0-9a-f:.]{2,45})\]|([a-z0-9_.-]{1,253}))(?::[0-9]{0,5})?", re.ASCII)


class AuthMiddleware:
    """Admits requests with the token or, if none is set, requests that name this host.

    Without a token, any web page in a browser on this machine could send requests. Such requests
    carry the page's domain as Origin or, with DNS rebinding, as Host, and are refused.

    The dashboard logs in with the token and then sends a cookie. A change that it requests carries
    the header X-Warmd, which pages of other origins cannot set.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, host: str, page: str) -> None:
        """`page`: the setting http_page."""
        self.app = app
        self.token = token
        self.host = host
        self.page = page
        self._memory = BodyMemory()
        self._drains = asyncio.Semaphore(_MAX_DRAINS)
        # Lanes, so that requests of one kind do not wait for thousands of another.
        self._throttle, self._reading_throttle, self._open_throttle = (_Throttle() for _ in "123")
        self._reading_turns, self._open_turns = Turns(_MAX_READING), Turns(_MAX_READING)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        has_session = self._has_session(scope, headers)
        is_known = self.token is None or has_session or self._has_token(headers)
        error = self._objection(scope, headers, is_known=is_known, has_session=has_session)
        scope[AUTHORIZED] = is_known and error is None  # before any wait
        is_open = not is_known or scope["path"] in OPEN
        is_reading = scope["method"] in _READING
        throttle = self._reading_throttle if is_reading else self._throttle
        await (self._open_throttle if is_open else throttle).wait()
        if error is not None:
            if error.status == 401 and "authorization" in headers:
                await asyncio.sleep(WRONG_S)  # so that guessing is slow
            await error.response(scope, receive, send)
            return
        reservation = Reservation(self._memory)
        if not is_known:
            body = _Body(receive, send, MAX_OPEN, None, self._drains, self._throttle)
        elif scope["path"] == FILES:  # written to disk in chunks, not held in memory
            body = _Body(receive, send, MAX_FILE, None, self._drains, self._throttle)
        else:
            body = _Body(receive, send, MAX_BODY, reservation, self._drains, self._throttle)
        length = headers.get("content-length", "")
        if int(length or 0) > body.limit:
            await body.too_large().response(scope, body.receive, body.send)
            return
        try:
            scope[RESERVATION] = reservation
            if is_reading:
                turns = self._open_turns if is_open else self._reading_turns
                await turns.serve(self.app, scope, body.receive, body.send)
            else:
                await self.app(scope, body.receive, body.send)
        finally:
            reservation.shrink(0)

    def _objection(
        self, scope: Scope, headers: Headers, *, is_known: bool, has_session: bool
    ) -> ApiError | None:
        if self.token is None:
            if not self._is_ours(headers.get("host", "")):
                return ApiError(403, "Host: must name this machine unless http_token is set")
            origin = headers.get("origin")
            if origin is not None and not self._is_ours(origin.partition("://")[2]):
                return ApiError(403, "Origin: web pages need a token: set http_token")
        if not is_known and not self._is_open(scope["path"]):
            return ApiError(
                401,
                "Authorization: must be a bearer token, the daemon's http_token",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if scope["method"] not in _CHANGING:
            return None
        return self._objection_to_change(scope["path"], headers, has_session)

    def _objection_to_change(
        self, path: str, headers: Headers, has_session: bool
    ) -> ApiError | None:
        """Refuse a change that a page of another origin may have requested (CSRF)."""
        site = headers.get("sec-fetch-site")  # which pages cannot set; other programs send none
        if self.page == "read" and path != LOGIN and (has_session or site is not None):
            return ApiError(403, "http_page: is read: the page changes nothing")
        if not has_session and not path.startswith(OWN):
            return None
        if headers.get("x-warmd") != "1":
            return ApiError(403, "X-Warmd: must be 1 in a request that changes something")
        if site != "same-origin" and (has_session or site is not None):
            return ApiError(403, "Sec-Fetch-Site: must be same-origin for a change")
        is_json = headers.get("content-type", "").partition(";")[0].strip() == "application/json"
        if path.startswith(OWN) and not is_json:
            return ApiError(415, "Content-Type: must be application/json")
        return None

    def _is_open(self, path: str) -> bool:
        """Whether no token is needed: for probes and, to log in, for the dashboard's files."""
        is_page = path in ("/", LOGIN) or path.startswith(PAGE)
        return path in OPEN or (is_page and self.page != "off")

    def _has_session(self, scope: Scope, headers: Headers) -> bool:
        if self.token is None or self.page == "off":
            return False
        name = session.cookie_name(scope["server"][1])
        found = HTTPConnection(scope).cookies.get(name)
        return found is not None and session.is_valid(self.token, found)

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        assert self.token is not None
        is_right = hmac.compare_digest(given.strip().encode(), self.token.encode())
        return scheme.lower() == "bearer" and is_right

    def _is_ours(self, netloc: str) -> bool:
        # Not with a URL parser, which would accept user@host.
        found = _NETLOC.fullmatch(netloc.lower())
        name = (found[1] or found[2]) if found is not None else ""
        return name == self.host or is_loopback(name)


class _Throttle:
    """Admits a few requests or pieces per event loop iteration.

    Hundreds in one iteration would delay /health, which needs several iterations.
    """

    def __init__(self) -> None:
        self._few = asyncio.Semaphore(_MAX_PER_LOOP)

    async def wait(self) -> None:
        async with self._few:
            await asyncio.sleep(0)


class _Body:
    """The body of a request, refused beyond the limit, and the response to it."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        limit: int,
        reservation: Reservation | None,
        drains: asyncio.Semaphore,
        throttle: _Throttle,
    ) -> None:
        """`reservation` of body memory; None for a body that is not held in memory."""
        self._receive = receive
        self._send = send
        self._reservation = reservation
        self._drains = drains
        self._throttle = throttle
        # The speed is measured over windows of SILENCE_S.
        self._window = self._latest = asyncio.get_running_loop().time()  # its begin; latest bytes
        self._in_window = 0  # bytes since its begin
        self._tail = b""
        self._has_image = False
        self.limit = limit  # bytes
        self.received = 0
        self.is_whole = False
        self.is_refused = False

    def too_large(self) -> ApiError:
        """Return the error for a body beyond the limit."""
        problem = f"a request must have at most {_size(self.limit)}"
        if self.limit == MAX_OPEN:
            problem = f"a request without token must have at most {_size(self.limit)}"
        if self.received <= self.limit and self._is_long_text():
            problem = f"a request without images must have at most {MAX_TEXT // 1024**2} MiB"
        return self._refused(ApiError(413, problem))

    def _refused(self, error: ApiError) -> ApiError:
        self.is_refused = True
        error.headers["connection"] = "close"
        return error

    async def receive(self) -> Message:
        if self.is_whole:  # only the disconnect of the client can follow
            return await self._receive()
        message = await self._receive_in_time()
        piece = message.get("body", b"")
        self.is_whole = not message.get("more_body", False)
        self.received += len(piece)
        if self.received > SMALL:
            await self._throttle.wait()
        self._detect_image(piece)
        if self.received > self.limit or self._is_long_text():
            raise _through(self.too_large())
        if self._reservation is not None:
            try:
                await self._reservation.grow(self.received)
            except ApiError as error:
                raise _through(self._refused(error)) from None
        return message

    async def _receive_in_time(self) -> Message:
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout_at(min(self._window, self._latest) + SILENCE_S):
                    message = await self._receive()
            except TimeoutError:
                is_slow = self._in_window < SILENCE_S * SLOWEST
                if is_slow or loop.time() >= self._latest + SILENCE_S:
                    raise _through(_TOO_SLOW) from None
                self._window, self._in_window = loop.time(), 0
            else:
                self._latest = loop.time()
                self._in_window += len(message.get("body", b""))
                return message

    def _detect_image(self, piece: bytes) -> None:
        if self._reservation is not None and not self._has_image:
            seen = self._tail + piece
            self._has_image = _IMAGE in seen
            self._tail = seen[-len(_IMAGE) :]

    def _is_long_text(self) -> bool:
        return self._reservation is not None and not self._has_image and self.received > MAX_TEXT

    async def send(self, message: Message) -> None:
        if self.is_refused and message["type"] == "http.response.body":
            # Closing a connection with unread bytes sends a reset, and the client may lose the
            # response: read until the client has sent everything or disconnected.
            await self._send({**message, "more_body": True})
            await self._drain()
            message = {"type": "http.response.body"}
        await self._send(message)

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S), self._drains:
                while (await self._receive()).get("more_body", False):
                    await self._throttle.wait()


_TOO_SLOW = ApiError(
    408,
    f"the body must arrive within {SILENCE_S} s, or at {SLOWEST // 1024} KiB/s or more",
    headers={"connection": "close"},
)


def _size(limit: int) -> str:
    return f"{limit // 1024**2} MiB" if limit >= 1024**2 else f"{limit // 1024} KiB"


def _through(error: ApiError) -> HTTPException:
    """Return the error as HTTPException, which FastAPI passes through while it reads a form."""
    return HTTPException(error.status, str(error), error.headers)
