"""Which web pages may send requests: ASGI middleware that checks what browsers send along.

A browser sends requests to the gateway for any page that it shows, also for one of another port of
this host. It names that page in Origin and Sec-Fetch-Site, which pages cannot set, so requests of
other pages are refused. Other programs send neither header.

What a proxy says about a request (Forwarded, X-Forwarded-*) is not read: any program can send it.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....configs.values import is_loopback
from .errors import ApiError

READING = ("GET", "HEAD", "OPTIONS")  # methods that change nothing
CHANGING = ("POST", "DELETE")  # no route has another method
_NETLOC = re.compile(r"(?:\[([0-9a-f:.]{2,45})\]|([a-z0-9_.-]{1,253}))(?::[0-9]{0,5})?", re.ASCII)
_PORTS = {"http": 80, "https": 443}


class BrowserMiddleware:
    """Refuses requests of pages other than the gateway's own, by Host, Origin, Sec-Fetch-Site.

    Host: without a token it must name this machine; after DNS rebinding it has the domain of the
    page. Origin: must be the gateway's, with scheme and port. Sec-Fetch-Site: must be same-origin;
    what users open themselves (`none`) may also be read, and any page may link to the dashboard.
    """

    def __init__(
        self, app: ASGIApp, *, host: str, origins: Collection[str], has_token: bool
    ) -> None:
        """`host`, `origins`: the settings http_host and http_origin."""
        self.app = app
        self.host = host
        self.origins = origins
        self.has_token = has_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_typed(message: Message) -> None:
            # No response but a script of the page may run as one.
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-content-type-options"] = "nosniff"
            await send(message)

        error = self._objection(scope, Headers(scope=scope))
        if error is not None:
            await error.response(scope, receive, send_typed)
        else:
            await self.app(scope, receive, send_typed)

    def _objection(self, scope: Scope, headers: Headers) -> ApiError | None:
        host = headers.get("host", "").lower()
        if not self.has_token and not self._is_ours(host):
            return ApiError(403, "Host: must name this machine unless http_token is set")
        if (origin := headers.get("origin")) is not None:
            own = self._origins_of(host)
            if origin.lower() not in own:
                shown = f"must be {' or '.join(own)}, got {origin[:80]!r}"
                return ApiError(403, f"Origin: {shown}: for a proxy, set http_origin")
        site = headers.get("sec-fetch-site", "same-origin")
        if site == "same-origin" or (site == "none" and scope["method"] in READING):
            return None
        is_link = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if is_link and scope["path"] == "/":
            return None
        return ApiError(403, f"Sec-Fetch-Site: must be same-origin, got {site[:80]!r}")

    def _is_ours(self, netloc: str) -> bool:
        # Not with a URL parser, which would accept user@host.
        found = _NETLOC.fullmatch(netloc)
        name = (found[1] or found[2]) if found is not None else ""
        return name == self.host or is_loopback(name)

    def _origins_of(self, host: str) -> Collection[str]:
        """Return the origins of pages of this gateway that a request with this Host may have.

        A public name has only the scheme of http_origin: a page of http://NAME may come from
        whoever can change unencrypted traffic.
        """
        public = [origin for origin in self.origins if host in _netlocs(origin)]
        return public or (f"http://{host}", *self.origins)


def _netlocs(origin: str) -> tuple[str, str]:
    """Return the values of Host that mean this origin."""
    scheme, _, netloc = origin.partition("://")
    return netloc, f"{netloc}:{_PORTS[scheme]}"
