"""Authorization and body limits: ASGI middleware that runs before a request is parsed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....jobs.environments import agent_keys
from . import client as clients, rights, session
from .bodies import SMALL, BodyMemory, Reservation
from .browser import CHANGING, READING
from .client import CLIENT, HttpClient
from .errors import ApiError, frame
from .open_requests import OpenRequest, OpenRequests
from .rights import RouteRights
from .session import Session
from .tickets import Tickets
from .tokens import Tokens
from .turns import Turns

log = logging.getLogger(__name__)

MAX_BODY = 64 * 1024**2  # bytes of a request with images
MAX_TEXT = 8 * 1024**2  # bytes of a request without images
MAX_FILE = 1024**3  # bytes of an uploaded file
MAX_OPEN = 4 * 1024  # bytes of a request without token, where one is set
LINGER_S = 10  # for reading the rest of a body that is too large
SILENCE_S = 30  # without data before a body is given up
SLOWEST = 16 * 1024  # bytes per second of a body, on average over SILENCE_S
WRONG_S = 1.0  # before a wrong token is refused
_LAST_S = 1.0  # for the last event of a stream that is ended
FILES = "/v1/files"
OPEN = ("/health", "/livez", "/readyz")  # paths without token
OWN = "/v1/warmd/"  # prefix of warmd's own routes
LOGIN = f"{OWN}login"
_OF_SESSION = (LOGIN, f"{OWN}logout", f"{OWN}tickets")  # they change no more than the session
PAGE = "/page/"  # prefix of the dashboard's files
SESSION = "warmd.session"  # key in the ASGI scope: the Session of the request, where it has one
RESERVATION = "warmd.reservation"  # key in the ASGI scope: the Reservation of the body
OF_AGENTS = ("/v1/chat/completions", "/v1/responses")  # what the key of an agent opens
_IMAGE = b"data:image"  # marks a body with images
_MAX_DRAINS = 8  # bodies that are drained at a time
_MAX_READING = 4  # requests that only read at a time, of clients with token and of others
_MAX_PER_LOOP = 4  # requests or pieces of bodies per event loop iteration


class AuthMiddleware:
    """Admits requests with a token that has the right or, if none is set, all.

    `browser` has refused those of other pages.

    The dashboard logs in with the token and then sends both halves of its session, or its cookie
    and a ticket. A change that it requests carries the header X-Warmd, which pages of other origins
    cannot set.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Tokens,
        requests: OpenRequests,
        needs: RouteRights,
        page: str,
        tickets: Tickets,
        sockets: Path,
    ) -> None:
        """`requests`: where it notes the open ones. `page`: the setting http_page.

        `sockets`: the folder of the daemon's sockets, where jobs have those of their agents.
        """
        self.app = app
        self._sockets = sockets
        self.page = page
        self.tickets = tickets
        self._tokens = tokens
        self._requests = requests
        self._needs = needs
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
        by_session = self._client_of_session(scope, headers)
        scope[CLIENT] = client = by_session or self._client_of_header(scope, headers)
        needed = self._needs.needed(scope)
        error = self._objection(scope, headers, client, needed, has_session=by_session is not None)
        if error is not None:
            throttle, _ = self._lane(scope, client)
            await throttle.wait()
            if error.status == 401 and ("authorization" in headers or session.HEADER in headers):
                await asyncio.sleep(WRONG_S)  # so that guessing is slow
            await error.response(scope, receive, send)
            return
        clients.enter(client)
        if client is None:
            body = _Body(receive, send, MAX_OPEN, None, self._drains, self._throttle)
            await self._answer(scope, headers, body, body.send)
            return
        reservation = scope[RESERVATION] = Reservation(self._memory, client.share)
        if scope["path"] == FILES:  # written to disk in chunks, not held in memory
            body = _Body(receive, send, MAX_FILE, None, self._drains, self._throttle)
        else:
            body = _Body(receive, send, MAX_BODY, reservation, self._drains, self._throttle)
        request = OpenRequest(client, needed, body.send)
        reservation.on_revoked = request.end
        try:
            with self._requests.holding(request):
                await self._answer(scope, headers, body, request.note)
        finally:
            reservation.shrink(0)
        if request.was_ended:
            await body.end(request, scope)
        if needed == rights.TRAIN and client.name is not None:
            path = scope["raw_path"].decode("ascii", "replace")
            log.info("http: %s: %s %s: %s", client.name, scope["method"], path, request.status)

    async def _answer(self, scope: Scope, headers: Headers, body: _Body, send: Send) -> None:
        throttle, turns = self._lane(scope, scope.get(CLIENT))
        await throttle.wait()
        if int(headers.get("content-length") or 0) > body.limit:
            await body.too_large().response(scope, body.receive, send)
        elif turns is not None:
            await turns.serve(self.app, scope, body.receive, send)
        else:
            await self.app(scope, body.receive, send)

    def _lane(self, scope: Scope, client: HttpClient | None) -> tuple[_Throttle, Turns | None]:
        """Return where a request waits, and the turns that it takes if it only reads."""
        is_reading = scope["method"] in READING
        if client is None or scope["path"] in OPEN:
            return self._open_throttle, self._open_turns if is_reading else None
        if is_reading:
            return self._reading_throttle, self._reading_turns
        return self._throttle, None

    def _objection(
        self,
        scope: Scope,
        headers: Headers,
        client: HttpClient | None,
        needed: str,
        *,
        has_session: bool,
    ) -> ApiError | None:
        if not self._is_open(scope["path"]):
            if client is None:
                return _unknown_token()
            if client.agent is not None and scope["path"] not in OF_AGENTS:
                opened = " and ".join(OF_AGENTS)
                return ApiError(403, f"Authorization: the key of an agent opens {opened} only")
            if needed not in (rights.ANY, rights.OPEN, *client.rights):
                log.info("http: %s: refused: needs %s", client.name, needed)
                return rights.refusal(str(client.name), client.rights, needed, scope)
        if scope["method"] not in CHANGING:
            return None
        return self._objection_to_change(scope["path"], headers, has_session)

    def _objection_to_change(
        self, path: str, headers: Headers, has_session: bool
    ) -> ApiError | None:
        """Refuse a change that a page of another origin may have requested (CSRF)."""
        is_of_page = has_session or "sec-fetch-site" in headers or "origin" in headers
        if self.page == "read" and path not in _OF_SESSION and is_of_page:
            return ApiError(403, "http_page: is read: the page changes nothing")
        if not has_session and not path.startswith(OWN):
            return None
        if headers.get("x-warmd") != "1":
            return ApiError(403, "X-Warmd: must be 1 in a request that changes something")
        is_json = headers.get("content-type", "").partition(";")[0].strip() == "application/json"
        if path.startswith(OWN) and not is_json:
            return ApiError(415, "Content-Type: must be application/json")
        return None

    def _is_open(self, path: str) -> bool:
        """Whether no token is needed: for probes and, to log in, for the dashboard's files."""
        is_page = path in ("/", LOGIN) or path.startswith(PAGE)
        return path in OPEN or (is_page and self.page != "off")

    def _client_of_session(self, scope: Scope, headers: Headers) -> HttpClient | None:
        """Return the client whose session the request has.

        A valid session is left in the scope for the route of tickets.
        """
        if not self._tokens.are_set or self.page == "off":
            return None
        cookie = HTTPConnection(scope).cookies.get(session.cookie_name(headers.get("host", "")))
        if cookie is None:
            return None
        secret = None
        if scope["method"] == "GET":
            secret = self.tickets.redeem(scope["path"], scope["query_string"], cookie)
        if secret is not None:
            scope["query_string"] = b""
        given = Session(cookie, secret or headers.get(session.HEADER, ""))
        client = self._tokens.client_of_session(given, address_of(scope))
        if client is not None:
            scope[SESSION] = given
        return client

    def _client_of_header(self, scope: Scope, headers: Headers) -> HttpClient | None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        is_bearer, secret = scheme.lower() == "bearer", given.strip()
        if is_bearer and secret.startswith(agent_keys.PREFIX):
            key = agent_keys.checked(self._sockets, secret)
            return None if key is None else HttpClient.of_agent(key)
        if not self._tokens.are_set:
            return self._tokens.anyone(address_of(scope))
        return self._tokens.client(secret, address_of(scope)) if is_bearer else None


def address_of(scope: Scope) -> str:
    """Return the address and the port of the other end: no two open connections have the same."""
    host, port = scope.get("client") or ("", 0)
    return f"{host} {port}"


def end_unauthorized(tokens: Tokens, requests: OpenRequests) -> None:
    """End the open requests whose tokens were taken out, or have lost the right for them."""
    for request in requests:
        now = tokens.current(request.client)
        if now is None:
            request.end(_unknown_token())
        elif request.right not in (rights.ANY, *now.rights):
            problem = f"Authorization: {now.name} has lost the right {request.right}"
            request.end(ApiError(403, problem, code="insufficient_permissions"))


def _unknown_token() -> ApiError:
    return ApiError(
        401,
        "Authorization: must be a bearer token that this daemon knows: http_token, one of "
        "http_tokens, or the key of an agent whose job is running",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


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
        if self.is_whole and self._reservation is not None:
            self._reservation.is_arriving = False
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

    async def end(self, request: OpenRequest, scope: Scope) -> None:
        """Answer a request that was ended from outside; a stream gets a last event."""
        error = request.error
        assert error is not None
        if not request.has_started:
            error = error if self.is_whole else self._refused(error)
            await error.response(scope, self.receive, request.note)
        elif request.is_stream:
            event = frame(error, is_named=scope["path"].startswith(OWN))
            with contextlib.suppress(TimeoutError):  # the client does not read
                async with asyncio.timeout(_LAST_S):
                    await self._send({"type": "http.response.body", "body": event})

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
