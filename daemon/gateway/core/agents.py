"""The requests of agents: each goes to the job that plays with the agent, not into the queue.

The job listens on a unix socket (jobs/environments/endpoint.py). It keeps the turn of a request for
a client that repeats it, so nothing is kept here: when the client leaves, the connection is closed.
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
from .sampling import FORMS
from .waiters import Caller

_REFUSAL_S = 1.0  # for the job to refuse a request
_MOST_BYTES = 64 << 20  # of a reply


class AgentRequests:
    """The open requests of agents, by ids that look like those of jobs. For one event loop."""

    def __init__(self) -> None:
        self._open: dict[str, _Request] = {}

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
        name = f"agent-{uuid.uuid4().hex}"
        self._open[name] = _Request(caller.agent, orjson.dumps(request))
        current = asyncio.current_task()  # it answers the client: when it ends, all is over
        assert current is not None
        current.add_done_callback(lambda _: self._end(name))
        return name

    def reply(self, name: str) -> asyncio.Future[dict[str, Any]] | None:
        """Return the coming result of a request, as an infer job has it; None: it is a job's."""
        found = self._open.get(name)
        return None if found is None else found.reply

    async def refusal(self, name: str) -> None:
        """Wait a moment for a refusal, which has no status once a stream has begun. Raises it."""
        if (found := self._open.get(name)) is not None:
            done, _ = await asyncio.wait({found.reply}, timeout=_REFUSAL_S)
            if done:
                found.reply.result()

    def acknowledge(self, name: str) -> None:
        """Tell the job that the client has got the result of a request."""
        if (found := self._open.get(name)) is not None:
            found.is_taken.set()

    def _end(self, name: str) -> None:
        """Forget a request; the job learns that a reply without acknowledgement is lost."""
        found = self._open.pop(name)
        if not found.is_taken.is_set():
            found.task.cancel()


class _Request:
    """A request on its way. `is_taken`: whether the client has got the reply."""

    def __init__(self, agent: AgentKey, content: bytes) -> None:
        self.reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.is_taken = asyncio.Event()
        self.task = asyncio.create_task(self._send(agent, content))

    async def _send(self, agent: AgentKey, content: bytes) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(agent.socket, limit=_MOST_BYTES)
        except OSError:
            self._set(_ended())
            return
        try:
            writer.write(content + b"\n")
            await writer.drain()
            del content
            self._set(_result_of(await reader.readline()))
            await self.is_taken.wait()
            writer.write(ACKNOWLEDGED)
            await writer.drain()
        except (OSError, ValueError):  # it has ended, or its answer is none
            self._set(_ended())
        finally:
            writer.close()

    def _set(self, found: dict[str, Any] | ApiError) -> None:
        if self.reply.done():
            return
        if isinstance(found, ApiError):
            self.reply.set_exception(found)
            self.reply.exception()  # retrieved: it may have no reader any more
        else:
            self.reply.set_result(found)


def _result_of(line: bytes) -> dict[str, Any] | ApiError:
    """Return what the job has answered; an error if it has ended."""
    if not line.endswith(b"\n"):
        return _ended()
    found = orjson.loads(line)
    if (error := found.get("error")) is not None:
        return _as_error(error)
    result: dict[str, Any] = found["result"]
    return result


def _as_error(error: Mapping[str, Any]) -> ApiError:
    """Return a refusal of a job; `option`: of an infer job, which may have another name here."""
    message, param = error["message"], error.get("param")
    if (option := error.get("option")) is not None:
        param = FORMS.get(option, option)
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
