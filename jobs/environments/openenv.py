"""An environment behind a URL: sessions of an OpenEnv server, by its websocket.

Runs in the process of an environment, which has one session at a time. The schema of the server's
actions decides how it is played: with one text field as Gymnasium's interface, with calls of tools
as TRL's. Source: GET /schema and the messages reset, step and close at /ws of openenv-core 0.3 and
openenv 0.10.
"""

from __future__ import annotations

import importlib.util
import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from http.client import HTTPException
from ipaddress import ip_address
from typing import Any
from urllib.parse import SplitResult, urlsplit

from ..errors import SpecError
from .interface import (
    GYMNASIUM,
    TOOLS,
    Environment,
    EnvironmentFault,
    info_of,
    number_of,
    observation_of,
)

_SCHEMES = {"ws": "http", "wss": "https", "http": "http", "https": "https"}  # of its schema
_SCHEMA_S = 10.0  # for the schema of a server
_CONNECT_S = 10.0  # for a session: a server may restart, or have no place yet
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # between two attempts
_CLOSE_S = 2.0
_MOST_BYTES = 32 << 20  # of a message
_MOST_SCHEMA_BYTES = 4 << 20
_METADATA = "metadata"  # a field of all actions and observations, not for the policy
_FULL = "CAPACITY_REACHED"


class _Refused(Exception):
    """The server has answered with an error; `code`: of OpenEnv, such as EXECUTION_ERROR."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.code = code


class OpenEnv(Environment):
    """An environment whose actions have one field of text, named `field`."""

    def __init__(self, url: str, field: str) -> None:
        super().__init__(_Session(url))
        self._field = field

    def reset(self, seed: int, row: Mapping[str, Any]) -> dict[str, Any]:
        """The server gets the seed and all columns of the row, and takes those that it names."""
        found = self.instance.reset({**row, "seed": seed})
        return {"observation": _observation("reset", found), "info": _info(found)}

    def act(self, action: Any) -> dict[str, Any]:
        found = self.instance.step({self._field: action})
        return {
            "observation": _observation("step", found),
            "reward": _reward(found),
            "terminated": found["done"] is True,
            "info": _info(found),
        }


class OpenEnvTools(Environment):
    """An environment whose actions call the tools that it lists.

    The reward of an episode is the sum of those of its calls.
    """

    def __init__(self, url: str) -> None:
        super().__init__(_Session(url))
        self._reward = 0.0

    def reset(self, seed: int, row: Mapping[str, Any]) -> dict[str, Any]:
        self._reward = 0.0
        found = self.instance.reset({**row, "seed": seed})
        fields = _fields(found)
        return {"observation": _observation("reset", found) if fields else None, "info": {}}

    def act(self, action: Any) -> dict[str, Any]:
        """Each result is a message of role `tool`; a call that fails is told to the model."""
        messages, failures = [], 0
        for call in action:  # at least one
            found = self.instance.step(
                {
                    "type": "call_tool",
                    "tool_name": call["name"],
                    "arguments": call["arguments"],
                }
            )
            self._reward += _reward(found)
            failed, content = _result(found["observation"])
            failures += failed
            messages.append({"role": "tool", "name": call["name"], "content": content})
            if found["done"] is True:
                break
        return {
            "observation": observation_of("a tool", messages),
            "failures": failures,
            "terminated": found["done"] is True,
            "info": _info(found),
        }

    def rewards(self) -> float | None:
        return self._reward

    def tools(self) -> list[dict[str, Any]]:
        """Return the tools that the server lists. Raises EnvironmentFault."""
        listed = self.instance.listed()
        if not (isinstance(listed, list) and listed):
            raise EnvironmentFault(f"{self.instance.url} must list its tools, got none")
        return [_schema_of(self.instance.url, tool) for tool in listed]


class _Session:
    """A session of the server at `url`, which connects when it is first used.

    Each method raises EnvironmentFault for what a server must not answer.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._socket: Any = None
        self._connection = ExitStack()  # ends the socket

    def reset(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Begin an episode."""
        found = self._first({"type": "reset", "data": values})
        if found["done"] is True or _reward(found):
            raise EnvironmentFault(
                "reset must begin an episode, got one that is over or has a reward"
            )
        return found

    def listed(self) -> Any:
        """Return the tools, which a server lists before any episode."""
        found = self._first({"type": "step", "data": {"type": "list_tools"}})
        return found["observation"].get("tools")

    def _first(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message; connect first, where that is to be done, for at most _CONNECT_S."""
        until, pause_s = time.monotonic() + _CONNECT_S, _FIRST_PAUSE_S
        while True:
            try:
                if self._socket is None:
                    with _as_os_error():
                        self._socket = self._connection.enter_context(_connection(self.url))
                return self._observed(message)
            except _Refused as refused:
                self._drop()
                if refused.code != _FULL:
                    words = f"{self.url} refuses {message['type']}: {refused}"
                    raise EnvironmentFault(words) from refused
                reason = f"{self.url} takes no more sessions (see --concurrency): {refused}"
            except OSError as error:  # a connection of before has been closed, too
                self._drop()
                reason = f"{self.url} must be an OpenEnv server, got {error}"
            if time.monotonic() + pause_s > until:
                raise EnvironmentFault(reason)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Do an action."""
        try:
            return self._observed({"type": "step", "data": action})
        except _Refused as refused:
            raise EnvironmentFault(f"{self.url} refuses step: {refused}") from refused
        except OSError as error:
            raise EnvironmentFault(f"{self.url} has closed the session: {error}") from error

    def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            with suppress(OSError, EnvironmentFault):
                self._send({"type": "close"})
            self._drop()

    def _observed(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message; return `observation`, `reward` and `done`.

        Raises OSError if the session has ended, and _Refused.
        """
        try:
            self._send(message)
        except OSError as error:  # a server without a place may have said so and closed before
            with suppress(OSError):
                refused = _refusal(self._received())
                if refused is not None and refused.code == _FULL:
                    raise refused from error
            raise
        answer = self._received()
        refused = _refusal(answer)
        if refused is not None:
            raise refused
        data = answer.get("data")
        if not (isinstance(data, dict) and isinstance(data.get("observation"), dict)):
            raise EnvironmentFault(
                f"{self.url} must answer {message['type']} with an observation, got "
                f"{str(answer)[:80]}"
            )
        return {"reward": None, "done": False, **data}

    def _send(self, message: Mapping[str, Any]) -> None:
        with _as_os_error():
            self._socket.send(json.dumps(message))

    def _received(self) -> dict[str, Any]:
        with _as_os_error():
            text = self._socket.recv()
        try:
            found = json.loads(text)
        except ValueError as error:
            raise EnvironmentFault(f"{self.url} must answer with JSON, got {error}") from error
        if not isinstance(found, dict):
            raise EnvironmentFault(f"{self.url} must answer with an object, got {text[:80]!r}")
        return found

    def _drop(self) -> None:
        if self._socket is not None:
            with suppress(OSError), _as_os_error():
                self._connection.close()
            self._socket = None


def _refusal(answer: Mapping[str, Any]) -> _Refused | None:
    """Return the error that an answer is; None: it is none."""
    data = answer.get("data")
    if answer.get("type") != "error" or not isinstance(data, dict):
        return None
    return _Refused(str(data.get("code")), str(data.get("message"))[:500])


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise what a websocket raises as OSError."""
    from websockets.exceptions import WebSocketException

    try:
        yield
    except WebSocketException as error:
        raise OSError(str(error)) from error


def resolve(text: str) -> tuple[str, Callable[[], Environment]]:
    """Return the interface of a server, and what makes a session, by its URL.

    Asks the server for the schema of its actions. Raises SpecError.
    """
    if importlib.util.find_spec("websockets") is None:
        raise SpecError("environment", "needs the package websockets: pip install 'warmd[agents]'")
    url = _checked(text)
    schema = _action_schema(url)
    properties = {
        name: one
        for name, one in schema.get("properties", {}).items()
        if name != _METADATA and isinstance(one, dict)
    }
    if {"tool_name", "arguments"} <= set(properties):
        return TOOLS, lambda: OpenEnvTools(url)
    texts = [name for name, one in properties.items() if _is_text(one)]
    others = [name for name in schema.get("required", ()) if name not in texts]
    if len(texts) != 1 or others:
        fields = ", ".join([*texts, *others]) or "none"
        raise SpecError(
            "environment",
            f"{url}: its actions must have one field of text, and no other required one, or call "
            f"tools, got {fields[:200]}",
        )
    return GYMNASIUM, lambda: OpenEnv(url, texts[0])


def _checked(text: str) -> str:
    """Return a URL without what a server does not get. Raises SpecError."""
    try:
        parts = urlsplit(text)
        is_known = parts.scheme in _SCHEMES and parts.hostname and parts.port != 0
    except ValueError:
        is_known = False
    if not is_known:
        raise SpecError(
            "environment", f"must be module:Class or ws://HOST:PORT (OpenEnv), got {text[:80]!r}"
        )
    if parts.username is not None or parts.password is not None:
        raise SpecError("environment", "a URL must have no user and no password, got one")
    if parts.query or parts.fragment:
        raise SpecError("environment", f"a URL must end with its path, got {text[:80]!r}")
    return text.rstrip("/")


def _action_schema(url: str) -> dict[str, Any]:
    """Return the JSON schema of the actions of a server. Raises SpecError."""
    parts = urlsplit(url)
    address = parts._replace(scheme=_SCHEMES[parts.scheme], path=f"{parts.path}/schema").geturl()
    handlers = [urllib.request.ProxyHandler({})] if _is_of_this_machine(parts) else []
    try:
        with urllib.request.build_opener(*handlers).open(address, timeout=_SCHEMA_S) as answer:
            found = json.loads(answer.read(_MOST_SCHEMA_BYTES))["action"]
        if not isinstance(found.get("properties"), dict):
            raise ValueError("a schema without properties")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, HTTPException) as error:
        raise SpecError(
            "environment",
            f"{url} must be an OpenEnv server that tells its schema, got {error or type(error)}",
        ) from error
    return found  # type: ignore[no-any-return]


def _is_of_this_machine(parts: SplitResult) -> bool:
    """Whether no proxy is asked for a host."""
    host = parts.hostname or ""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _connection(url: str) -> AbstractContextManager[Any]:
    """Return a new connection. Raises OSError, and what a websocket raises."""
    from websockets.sync.client import connect

    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}[_SCHEMES[parts.scheme]]
    return connect(
        parts._replace(scheme=scheme, path=f"{parts.path}/ws").geturl(),
        open_timeout=_SCHEMA_S,
        close_timeout=_CLOSE_S,
        max_size=_MOST_BYTES,
        ping_interval=None,  # a step may take longer: the limits of the job decide
        proxy=None if _is_of_this_machine(parts) else True,
    )


def _is_text(schema: Mapping[str, Any]) -> bool:
    kinds = [schema, *(one for one in schema.get("anyOf", ()) if isinstance(one, dict))]
    return "const" not in schema and any(one.get("type") == "string" for one in kinds)


def _fields(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an observation says to the policy."""
    return {name: value for name, value in found["observation"].items() if name != _METADATA}


def _observation(where: str, found: Mapping[str, Any]) -> Any:
    """Return an observation as text: its only field, or all of them as JSON."""
    fields = _fields(found)
    (only,) = fields.values() if len(fields) == 1 else (None,)
    text = only if isinstance(only, str) else json.dumps(fields, ensure_ascii=False)
    return observation_of(where, text)


def _reward(found: Mapping[str, Any]) -> float:
    """Return the reward of a step; one without has none to add."""
    reward = found["reward"]
    return 0.0 if reward is None else number_of("the reward of step", reward)


def _info(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is reported of the metadata: `success`."""
    metadata = found["observation"].get(_METADATA)
    return info_of("step", metadata if isinstance(metadata, dict) else {})


def _result(observation: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether a call has failed, and what the policy is told.

    A result is a value, or one of MCP: `data`, or `content` of texts, and `is_error`.
    """
    error, found = observation.get("error"), observation.get("result")
    failed = error is not None
    if isinstance(error, dict):
        found = error.get("message")
    elif isinstance(found, dict) and isinstance(found.get("content"), list):
        failed = found.get("is_error") is True
        if (data := found.get("data")) is not None:
            found = data
        else:
            parts = [one for one in found["content"] if isinstance(one, dict)]
            found = "\n".join(str(one.get("text", one)) for one in parts)
    text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    return failed, str({"error": text}) if failed else text


def _schema_of(url: str, tool: Any) -> dict[str, Any]:
    """Return the schema of a tool as chat templates take it. Raises EnvironmentFault."""
    if not (isinstance(tool, dict) and isinstance(tool.get("name"), str)):
        raise EnvironmentFault(f"{url} must list tools with names, got {str(tool)[:80]}")
    parameters = tool.get("input_schema") or {"type": "object", "properties": {}}
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": parameters,
    }
    return {"type": "function", "function": function}
