"""The requests of agents: each goes to the job that plays with the agent, not into the queue.

The job listens on a unix socket (jobs/environments/endpoint.py). It keeps what it has begun for a
client that comes back, so nothing is kept here: when the client leaves, the connection is closed.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

import orjson

from ....jobs.environments.agent_keys import AgentKey
from ....jobs.environments.endpoint import ACKNOWLEDGED
from ....jobs.spec import Spec
from ..http.errors import ApiError
from .waiters import Caller

_PREFIX = "agent-"
_PARAMS = {"json_schema": "response_format"}  # option of the infer kind -> field of a request
_MOST_BYTES = 64 << 20  # of a reply


class AgentRequests:
    """The open requests of agents, by ids that look like those of jobs. For one event loop."""

    def __init__(self) -> None:
        self._replies: dict[str, asyncio.Task[dict[str, Any]]] = {}

    def submit(self, caller: Caller, spec: Spec) -> str:
        """Send a request to its job; return its id. `spec`: of the infer job that it would be."""
        assert caller.agent is not None
        options = spec.options()
        given = {
            name: value
            for name, value in spec.to_json().items()
            if name in options and getattr(spec, name) != options[name].default
        }
        request = {
            "key": caller.agent.text,
            "fingerprint": caller.fingerprint,
            "is_retry": bool(caller.retry),
            "options": given,
        }
        name = f"{_PREFIX}{uuid.uuid4().hex}"
        self._replies[name] = asyncio.create_task(_ask(caller.agent, orjson.dumps(request)))
        return name

    def reply(self, name: str) -> asyncio.Task[dict[str, Any]] | None:
        """Return the coming result of a request, as an infer job has it; None: it is a job's."""
        return self._replies.get(name)

    def end(self, name: str) -> bool:
        """Forget a request, and give it up if it is open; return whether it is not a job's."""
        if (task := self._replies.pop(name, None)) is not None:
            task.cancel()
        return name.startswith(_PREFIX)


async def _ask(agent: AgentKey, request: bytes) -> dict[str, Any]:
    """Return the result of a request. Raises ApiError."""
    try:
        reader, writer = await asyncio.open_unix_connection(agent.socket, limit=_MOST_BYTES)
    except OSError:
        raise _ended() from None
    try:
        writer.write(request + b"\n")
        await writer.drain()
        line = await reader.readline()
        if not line.endswith(b"\n"):
            raise _ended()
        writer.write(ACKNOWLEDGED)
        await writer.drain()
    except OSError:
        raise _ended() from None
    finally:
        writer.close()
    found = orjson.loads(line)
    if (error := found.get("error")) is not None:
        raise _as_error(error)
    result: dict[str, Any] = found["result"]
    return result


def _as_error(error: Mapping[str, Any]) -> ApiError:
    """Return a refusal of a job; `option`: of an infer job, which may have another name here."""
    message, param = error["message"], error.get("param")
    if (option := error.get("option")) is not None:
        param = _PARAMS.get(option, option)
        message = f"{param}: {message}"
    return ApiError(
        error["status"],
        message,
        param=param,
        code=error.get("code"),
        headers={"x-should-retry": "false"},
    )


def _ended() -> ApiError:
    return ApiError(
        410,
        "Authorization: the job of this key has ended",
        code="episode_ended",
        headers={"x-should-retry": "false"},
    )
