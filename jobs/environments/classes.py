"""A user's class as an environment: Gymnasium's `reset` and `step`, or TRL's tool methods.

Runs in the process of the environment. Both kinds become an `Environment`, whose answers are plain
values.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

from ..errors import SpecError
from ..user_code.modules import named
from . import demo
from .interface import (
    GYMNASIUM,
    TOOLS,
    Environment,
    EnvironmentFault,
    close,
    info_of,
    kind_of,
    number_of,
    observation_of,
)

_PREFIXES = {"gym": GYMNASIUM, "tools": TOOLS}
_DEMO = "demo"
_NO_TOOLS = ("reset", "get_reward")  # public methods of TRL's class that the policy cannot call


class GymnasiumEnvironment(Environment):
    """`reset(seed=…, options=…)` and `step(action)`, with text."""

    def __init__(self, instance: Any) -> None:
        super().__init__(instance)
        self._takes = _keywords(instance.reset)

    def reset(self, seed: int, row: Mapping[str, Any]) -> dict[str, Any]:
        """`reset` gets what it names: `seed`, `options` (the row), and columns of the row."""
        offered = {**row, "seed": seed, "options": dict(row)}
        given = {name: value for name, value in offered.items() if self._takes(name)}
        found = self.instance.reset(**given)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise EnvironmentFault(f"reset must return (observation, info), got {kind_of(found)}")
        observation, info = found
        return {"observation": observation_of("reset", observation), "info": info_of("reset", info)}

    def act(self, action: Any) -> dict[str, Any]:
        found = self.instance.step(action)
        if not (isinstance(found, tuple) and len(found) == 5):
            raise EnvironmentFault(
                "step must return (observation, reward, terminated, truncated, info), got "
                f"{kind_of(found)}"
            )
        observation, reward, terminated, truncated, info = found
        return {
            "observation": observation_of("step", observation),
            "reward": number_of("the reward of step", reward),
            "terminated": bool(terminated),
            "truncated": bool(truncated),
            "info": info_of("step", info),
        }


class ToolEnvironment(Environment):
    """`reset(**row)`, and public methods that the policy calls as tools."""

    def reset(self, seed: int, row: Mapping[str, Any]) -> dict[str, Any]:
        found = self.instance.reset(**row)
        if found is not None and not isinstance(found, str | list):
            raise EnvironmentFault(f"reset must return text or None, got {kind_of(found)}")
        return {"observation": observation_of("reset", found), "info": {}}

    def act(self, action: Any) -> dict[str, Any]:
        """Each result is a message of role `tool`. What a tool raises is told to the model."""
        messages = []
        failures = 0
        for call in action:
            try:
                result = self._call(call["name"], call["arguments"])
            except Exception as error:  # TRL's way to reject an action
                failures += 1
                result = {"error": str(error)}
            content = result if isinstance(result, list) else str(result)
            messages.append({"role": "tool", "name": call["name"], "content": content})
        return {"observation": observation_of("a tool", messages), "failures": failures}

    def check_reward(self) -> None:
        if not callable(getattr(self.instance, "get_reward", None)):
            raise EnvironmentFault(
                f"{type(self.instance).__name__} must have a method get_reward, or the job a "
                "reward, got neither"
            )

    def _call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        if name not in tools_of(type(self.instance)):
            raise ValueError(f"Tool {name} not found.")
        found = getattr(self.instance, name)(**arguments)
        return settled(found)

    def tools(self) -> list[dict[str, Any]]:
        """Return the schemas as TRL makes them, from signatures and docstrings.

        Raises EnvironmentFault for a tool that they do not describe.
        """
        from transformers.utils.chat_template_utils import get_json_schema

        found = []
        for name in tools_of(type(self.instance)):
            try:
                found.append(get_json_schema(getattr(self.instance, name)))
            except Exception as error:  # of any type: it reads docstrings and type hints
                raise EnvironmentFault(
                    f"the tool {name} must have type hints and a docstring with Args: {error}"
                ) from error
        return found

    def rewards(self) -> float | None:
        give = getattr(self.instance, "get_reward", None)
        if not callable(give):
            return None
        found = settled(give())
        return None if found is None else number_of("get_reward", found)


def settled(found: Any) -> Any:
    """Return the result of a coroutine; anything else as it is."""

    async def awaited() -> Any:
        return await found

    return asyncio.run(awaited()) if inspect.isawaitable(found) else found


def resolve(text: str) -> tuple[str, dict[str | None, Callable[[], Environment]]]:
    """Return the interface of an environment, and what makes one, by its name in the data.

    `text`: `demo:NAME`, `module:Class`, or `module:dict` of factories; `gym:` or `tools:` before it
    decides for a class that has both interfaces; or the URL of an OpenEnv server. A single class
    has the name None. Raises SpecError.
    """
    first, _, rest = text.partition(":")
    if first == _DEMO:
        if rest not in demo.ENVIRONMENTS:
            known = ", ".join(f"{_DEMO}:{name}" for name in demo.ENVIRONMENTS)
            raise SpecError("environment", f"must be module:Class, or {known}, got {text[:80]!r}")
        factory = demo.ENVIRONMENTS[rest]
        return GYMNASIUM, {None: lambda: GymnasiumEnvironment(factory())}
    if "://" in text:
        from . import openenv  # its libraries of HTTP are 5 MB in the process of an environment

        interface, make = openenv.resolve(text)
        return interface, {None: make}
    wanted, name = (_PREFIXES[first], rest) if first in _PREFIXES and ":" in rest else (None, text)
    if not all(name.partition(":")):
        raise SpecError("environment", f"must be module:Class, got {text[:80]!r}")
    found = named("environment", name)
    factories: dict[str | None, Any] = dict(found) if isinstance(found, dict) else {None: found}
    if not factories:
        raise SpecError("environment", f"{name} must have a class, got an empty dict")
    kinds = {_interface(name, factory, wanted) for factory in factories.values()}
    if len(kinds) != 1:
        raise SpecError("environment", f"{name}: its classes must have one interface, got both")
    (interface,) = kinds
    made = GymnasiumEnvironment if interface == GYMNASIUM else ToolEnvironment

    def maker(factory: Callable[[], Any]) -> Callable[[], Environment]:
        return lambda: made(factory())

    return interface, {key: maker(factory) for key, factory in factories.items()}


def tools_of(instance_type: type) -> list[str]:
    """Return the names of the methods of TRL's class that the policy can call."""
    return [
        name
        for name, member in inspect.getmembers(instance_type, callable)
        if not name.startswith("_") and name not in _NO_TOOLS and inspect.isroutine(member)
    ]


def _interface(name: str, factory: Any, wanted: str | None) -> str:
    """Return the interface of a class. Raises SpecError."""
    if not callable(factory):
        got = "no such name" if factory is None else f"a {type(factory).__name__}"
        raise SpecError("environment", f"{name} must be a class, or a dict of classes, got {got}")
    if not inspect.isclass(factory):  # a function that makes one
        instance = factory()
        factory = type(instance)
        close(instance)
    has_step = callable(getattr(factory, "step", None))
    if not callable(getattr(factory, "reset", None)):
        raise SpecError("environment", f"{name}: the class must have a method reset, got none")
    if wanted == GYMNASIUM and not has_step:
        raise SpecError("environment", f"{name}: must have a method step (gym:), got none")
    if wanted is not None:
        return wanted
    if has_step:
        return GYMNASIUM
    if not tools_of(factory):
        raise SpecError(
            "environment",
            f"{name}: the class must have a method step (Gymnasium), or public methods that are "
            "tools (TRL), got neither",
        )
    return TOOLS


def _keywords(function: Callable[..., Any]) -> Callable[[str], bool]:
    """Return whether a function takes a keyword, by its signature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return lambda name: name in ("seed", "options")
    if any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values()):
        return lambda name: True
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    names = {name for name, one in parameters.items() if one.kind in kinds}
    return names.__contains__
