"""What an environment is to the process that plays it, and what it may answer.

Source of the two interfaces: gymnasium.Env 1.x with text as observation and action;
environment_factory of TRL's GRPOTrainer 1.16.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import isfinite
from typing import Any

from ..errors import SpecError
from ..files.chats import Messages
from ..files.jsonl import Place
from ..models import image_parts
from ..rewards.user_rewards import MOST_REWARD

ENVIRONMENT, AGENT = "environment", "agent"  # options that name what plays
ENVIRONMENTS = "environments"  # the keyword of reward functions that has the user's objects
GYMNASIUM, TOOLS = "gymnasium", "tools"
MOST_CHARACTERS = 4_000_000  # of an observation


class EnvironmentFault(Exception):
    """The environment did what its interface does not allow; the message says what."""


class Environment(ABC):
    """One instance of the user's class, used for one episode after another."""

    def __init__(self, instance: Any) -> None:
        self.instance = instance

    @abstractmethod
    def reset(self, seed: int, row: Mapping[str, Any]) -> dict[str, Any]:
        """Begin an episode; return its `observation`, or for tools what to add to the prompt.

        An observation is text or a list of messages, None for nothing. Raises EnvironmentFault.
        """

    @abstractmethod
    def act(self, action: Any) -> dict[str, Any]:
        """Do what the policy has chosen; return the `observation`, and what ends the episode.

        `action`: text, or for tools a list of calls with `name` and `arguments`.
        """

    def rewards(self) -> float | None:
        """Return the reward of the episode that the environment itself gives; None for none."""
        return None

    def check_reward(self) -> None:  # noqa: B027
        """Raise EnvironmentFault if it gives no reward, and no function does."""

    def tools(self) -> list[dict[str, Any]]:
        """Return the JSON schemas of what the policy can call."""
        return []

    def close(self) -> None:
        """Release what the instance holds."""
        close(self.instance)


def close(instance: Any) -> None:
    close = getattr(instance, "close", None)
    if callable(close):
        close()


def observation_of(where: str, found: Any) -> Any:
    """Return an observation as text or messages. Raises EnvironmentFault."""
    if isinstance(found, Mapping):
        found = [found]
    if isinstance(found, list):
        plain: Any = _messages(where, found)
        size = sum(len(str(one)) for one in plain)
    elif found is None or isinstance(found, str):
        size, plain = len(found or ""), found
    else:
        raise EnvironmentFault(
            f"{where} must return text, a message or a list of messages as the observation, got "
            f"{kind_of(found)}"
        )
    if size > MOST_CHARACTERS:
        raise EnvironmentFault(
            f"{where}: an observation must have at most {MOST_CHARACTERS:,} characters, got "
            f"{size:,}"
        )
    return plain


def _messages(where: str, found: list[Any]) -> Any:
    """Return messages, or the text of content parts that are texts. Raises EnvironmentFault."""
    place = Place("environment", f"the observation of {where}", 0)
    has_parts = bool(found) and all(isinstance(one, Mapping) and "type" in one for one in found)
    try:
        if has_parts:
            (message,) = _read([{"role": "user", "content": found}], place)
            return message["content"] if isinstance(message["content"], str) else [message]
        return _read(found, place)
    except SpecError as error:
        raise EnvironmentFault(error.problem) from error


def _read(found: list[Any], place: Place) -> Messages:
    """Return messages, which may have images. Raises SpecError."""
    return image_parts.joined(image_parts.read(found, place, (image_parts.DATA,)))


def number_of(what: str, found: Any) -> float:
    """Return a finite number. Raises EnvironmentFault."""
    try:
        number = float(found)
    except (TypeError, ValueError, OverflowError):
        raise EnvironmentFault(f"{what} must be a number, got {kind_of(found)}") from None
    if isinstance(found, str) or not isfinite(number):
        raise EnvironmentFault(f"{what} must be a finite number, got {kind_of(found)}")
    if abs(number) > MOST_REWARD:
        raise EnvironmentFault(f"{what} must be at most {MOST_REWARD:g}, got {kind_of(found)}")
    return number


def info_of(where: str, found: Any) -> dict[str, Any]:
    """Return what is reported of an info: `success`. Raises EnvironmentFault."""
    if not isinstance(found, Mapping):
        raise EnvironmentFault(f"the info of {where} must be a dict, got {kind_of(found)}")
    return {"success": bool(found["success"])} if "success" in found else {}


def kind_of(found: Any) -> str:
    text = repr(found)
    return f"{type(found).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
