"""Requests to the HTTP API of a daemon: whatever it refuses, it refuses here, too."""

from __future__ import annotations

import secrets
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import urlencode

import orjson

from ...jobs.errors import Unavailable, WarmdError

_TIMEOUT_S = 600.0  # a check of a large data set takes minutes
_CHANGE = {"X-Warmd": "1"}
_QUOTED = str.maketrans({'"': "%22", "\r": "%0D", "\n": "%0A"})  # as browsers do in forms


class Refused(WarmdError):
    """The API has refused a request; the message is its own."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None  # the token would be sent along


class Gateway:
    """One daemon's HTTP API. Each method blocks, and raises Refused or Unavailable."""

    def __init__(self, locate: Callable[[], str], token: str | None) -> None:
        """`locate` returns the address, `http://HOST:PORT`; it may raise WarmdError."""
        self._locate = locate
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        # No proxy: the token is for this address only.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())

    def get(self, path: str, **query: Any) -> Any:
        """Return the JSON of a route; parameters that are None are left out."""
        given = {name: value for name, value in query.items() if value is not None}
        return self._send(path + (f"?{urlencode(given, doseq=True)}" if given else ""))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a JSON object; return the answer's JSON."""
        headers = {**_CHANGE, "Content-Type": "application/json"}
        return self._send(path, orjson.dumps(body), headers)

    def upload(self, filename: str, content: bytes) -> Any:
        """Upload a data file; return its description."""
        boundary = secrets.token_hex(16)
        filename = filename.translate(_QUOTED)
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; '
            f'filename="{filename}"\r\nContent-Type: application/octet-stream\r\n\r\n'
        )
        body = head.encode() + content + f"\r\n--{boundary}--\r\n".encode()
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        return self._send("/v1/files", body, headers)

    def _send(
        self, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        request = urllib.request.Request(
            self._locate().rstrip("/") + path, body, {**self._headers, **(headers or {})}
        )
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as reply:
                return orjson.loads(reply.read())
        except urllib.error.HTTPError as error:
            raise Refused(_message_of(error)) from None
        except (OSError, HTTPException, orjson.JSONDecodeError) as error:
            reason = getattr(error, "reason", error)
            raise Unavailable(f"the gateway does not answer at {request.host}: {reason}") from error


def _message_of(error: urllib.error.HTTPError) -> str:
    try:
        with error:
            return str(orjson.loads(error.read())["error"]["message"])
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return f"HTTP {error.code}: {error.reason}"
