"""The tokens of the gateway: `http_token`, and those of the file `http_tokens`, which is watched.

The file is polled. A change is applied when two reads in a row return the same text, since editors
write in several steps. An invalid file lets in only tokens that were let in before and have an
unchanged entry; an unreadable file lets in no named token.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
from collections.abc import Callable
from pathlib import Path

from ....configs.config import DaemonConfig
from ....configs.tokens import MAIN, NamedToken, digest_of, parse, read_text, unchanged
from ....configs.values import ConfigError
from ....jobs.files.atomic import write_atomic
from . import session
from .client import HttpClient
from .session import Session

log = logging.getLogger(__name__)

_POLL_S = 1.0  # interval between two reads of the file
_MOST_LOOKS = 3  # reads of a file that keeps changing, before it is applied
_KEY_BYTES = 32

_Look = tuple[str | None, str | None]  # the content of the file, or why there is none


class Tokens:
    """The tokens that are let in now. For one event loop."""

    def __init__(self, config: DaemonConfig) -> None:
        self._main = config.http_token
        self._path = config.http_tokens
        self._key = _session_key(config.home / "http.key") if self.are_set else b""
        self._named: tuple[NamedToken, ...] = ()
        self.problem: str | None = None  # the error of an invalid file; None: it is valid
        self._applied: _Look = ("", None)
        if self._path is not None:
            self._apply(self._look())

    @property
    def are_set(self) -> bool:
        """Whether requests need a token."""
        return self._main is not None or self._path is not None

    @property
    def names(self) -> list[str]:
        """The named tokens that are let in."""
        return [token.name for token in self._named]

    def client(self, secret: str, address: str) -> HttpClient | None:
        """Return the client with this secret; None: it is wrong. `address`: of the connection."""
        # Compared with all in constant time: the answer's time shows nothing about a secret.
        is_main = self._main is not None and hmac.compare_digest(
            secret.encode(errors="replace"), self._main.encode()
        )
        digest, found = digest_of(secret), None
        for token in self._named:
            if hmac.compare_digest(digest, token.digest):
                found = token
        if is_main:
            return self._client_of(None, address)
        return None if found is None else self._client_of(found, address)

    def anyone(self, address: str) -> HttpClient:
        """Return the client of a request where no token is set."""
        return HttpClient(name=None, share=address)

    def issue(self, client: HttpClient) -> Session:
        """Return a new session of a client with a token."""
        key = self._key_of(str(client.name))
        assert key is not None
        return session.issue(str(client.name), key)

    def client_of_session(self, given: Session, address: str) -> HttpClient | None:
        """Return the client of a session; None: it is not valid, or its token is no longer."""
        name = session.verify(given, self._key_of)
        return None if name is None else self._client_of(self._find(name), address)

    def current(self, client: HttpClient) -> HttpClient | None:
        """Return a client with the rights that it has now; None: it is no longer let in."""
        if client.token is None:
            return client
        token = self._find(client.token.name)
        is_same = token is not None and token.digest == client.token.digest
        return self._client_of(token, client.share) if is_same else None

    async def watch(self, on_change: Callable[[], None]) -> None:
        """Read the file again when it changes, and call `on_change` then; until canceled."""
        before, number = self._applied, 0
        while True:
            await asyncio.sleep(_POLL_S)
            found = await asyncio.to_thread(self._look)
            number = number + 1 if found != self._applied else 0
            if number and (found == before or number > _MOST_LOOKS):
                self._apply(found)
                on_change()
                number = 0
            before = found

    def _client_of(self, token: NamedToken | None, address: str) -> HttpClient:
        name = MAIN if token is None else token.name
        # Clients are told apart by token where the file is set, else by connection.
        share = address if self._path is None else f"token {name}"
        if token is None:
            return HttpClient(name, share)
        return HttpClient(name, share, token.rights, token)

    def _find(self, name: str) -> NamedToken | None:
        return next((token for token in self._named if token.name == name), None)

    def _key_of(self, name: str) -> bytes | None:
        """Return the key of the sessions of a token; they end with it, or with a new secret."""
        if name == MAIN:
            known = None if self._main is None else self._main
        else:
            known = None if (token := self._find(name)) is None else token.digest
        if known is None:
            return None
        # The MAC has a key of this home: a session's secret cannot be used to test guesses of the
        # token, nor be computed from the token's hash.
        about = f"warmd sessions of {name} {known}"
        return hmac.new(self._key, about.encode(), hashlib.sha256).digest()

    def _look(self) -> _Look:
        assert self._path is not None
        try:
            return read_text(self._path), None
        except ConfigError as error:
            return None, str(error)

    def _apply(self, look: _Look) -> None:
        assert self._path is not None
        before = self._named
        text, self.problem = self._applied = look
        if text is None:
            self._named = ()
        else:
            try:
                self._named = parse(text, self._path)
            except ConfigError as error:
                self.problem = str(error)
                self._named = unchanged(before, text)
        if self.problem is not None:
            log.error("http: tokens: %s; let in: %s", self.problem, ", ".join(self.names) or "none")
        for token in before:
            if token not in self._named:
                log.info("http: tokens: %s is out", token.name)
        for token in self._named:
            if token not in before:
                log.info("http: tokens: %s may %s", token.name, token.may)


def _session_key(path: Path) -> bytes:
    """Return the key in a file of the home; it is created at the first start."""
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        key = b""
    if len(key) != _KEY_BYTES:
        key = os.urandom(_KEY_BYTES)
        write_atomic(path, key)
    return key
