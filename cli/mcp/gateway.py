"""Requests to the HTTP API of a daemon: whatever it refuses, it refuses here, too."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import orjson

from ...jobs.errors import SpecError, Unavailable, WarmdError

_TIMEOUT_S = 600.0  # a check of a large data set takes minutes


class Refused(WarmdError):
    """The API has refused a request; the message is its own."""


class Gateway:
    """One daemon's HTTP API. Each request raises Refused or Unavailable."""

    def __init__(self, locate: Callable[[], str], token: str | None) -> None:
        """`locate` returns the address, `http://HOST:PORT`; it may block and raise WarmdError."""
        self._locate = locate
        self._certificates = ssl.create_default_context()  # made once: it takes 50 ms
        self._headers = {"X-Warmd": "1"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    async def get(self, path: str, **query: Any) -> Any:
        """Return the JSON of a route; parameters that are None are left out."""
        given = {name: value for name, value in query.items() if value is not None}
        return await self._send("GET", path, params=given)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a JSON object; return the answer's JSON."""
        return await self._send("POST", path, json=dict(body))

    async def upload(self, filename: str, content: bytes) -> Any:
        """Upload a data file; return its description."""
        form = {"data": {"purpose": "fine-tune"}, "files": {"file": (filename, content)}}
        return await self._send("POST", "/v1/files", **form)

    async def _send(self, method: str, path: str, **content: Any) -> Any:
        address = (await asyncio.to_thread(self._locate)).rstrip("/")
        # No proxy and no redirect: the token is for this address only.
        client = httpx.AsyncClient(
            headers=self._headers,
            verify=self._certificates,
            timeout=_TIMEOUT_S,
            trust_env=False,
            follow_redirects=False,
        )
        try:
            async with client:
                reply = await client.request(method, address + path, **content)
            if reply.is_success:
                return orjson.loads(reply.content)
        except (httpx.HTTPError, orjson.JSONDecodeError) as error:
            reason = str(error) or type(error).__name__
            raise Unavailable(f"the gateway does not answer at {address}: {reason}") from error
        raise Refused(_message_of(reply))


def _message_of(reply: httpx.Response) -> str:
    try:
        return str(orjson.loads(reply.content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {reply.status_code}: {reply.reason_phrase}"


def checked_address(url: str) -> str:
    """Return the address of an HTTP API. Raises SpecError for anything else."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        parts.port  # noqa: B018 (raises ValueError for one that is none)
    except ValueError:
        is_address = False
    if not is_address:
        raise SpecError("url", f"must be http://HOST:PORT or https://HOST, got {url[:80]!r}")
    return url
