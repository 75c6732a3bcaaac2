"""The client of a request: its token, its rights and its share of the gateway.

Connections, uploads, body memory and queue places are divided between clients by
`HttpClient.share`: by token where several are set, else by connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ....configs.tokens import RIGHTS, NamedToken
from ....jobs.environments.agent_keys import AgentKey
from .rights import INFER

CLIENT = "warmd.client"  # key in the ASGI scope: the request's HttpClient; None: not authorized


@dataclass(frozen=True)
class HttpClient:
    """The client of an authorized request."""

    name: str | None  # the name of its token; None: no token is set
    share: str  # clients with the same share count as one
    rights: frozenset[str] = frozenset(RIGHTS)
    token: NamedToken | None = None  # its entry in the file of tokens; None: it has none
    agent: AgentKey | None = None  # of an agent, whose requests its job answers

    @classmethod
    def of_agent(cls, key: AgentKey) -> HttpClient:
        """Return the client with the key of an agent; agents of a job have one share."""
        return cls(f"agent of {key.job}", f"agent {key.job}", frozenset((INFER,)), agent=key)


_current: ContextVar[HttpClient | None] = ContextVar("client", default=None)


def enter(client: HttpClient | None) -> None:
    """Note the client of the request that the current task answers."""
    _current.set(client)


def current() -> HttpClient | None:
    """Return the client of the request that the current task answers; None outside of one."""
    return _current.get()


def current_name() -> str | None:
    """Return the name of its token; None: no token is set."""
    client = current()
    return None if client is None else client.name


def share_of(scope: Mapping[str, Any]) -> str | None:
    """Return the share of an authorized request; None for one without token, where one is set."""
    client: HttpClient | None = scope.get(CLIENT)
    return None if client is None else client.share
