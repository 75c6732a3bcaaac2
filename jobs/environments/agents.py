"""The user's agent: a function of a task that returns what its episode is worth.

Runs in the process of an episode. The function finds the model at OPENAI_BASE_URL with the key
OPENAI_API_KEY, by which the requests of an episode are told from those of others.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from ..errors import SpecError
from ..user_code.modules import named
from .classes import settled
from .interface import EnvironmentFault, number_of

MOST_PARTS = 64  # of a reward
_LOCAL = "127.0.0.1,localhost,::1"

Agent = Callable[[dict[str, Any]], Any]


def resolve(text: str) -> Agent:
    """Return the function `module:function` of the user. Raises SpecError."""
    if not all(text.partition(":")):
        raise SpecError("agent", f"must be module:function, got {text[:80]!r}")
    found = named("agent", text)
    if not callable(found):
        got = "no such name" if found is None else f"a {type(found).__name__}"
        raise SpecError("agent", f"{text} must be a function, got {got}")
    with suppress(ValueError):  # it has no signature
        try:
            inspect.signature(found).bind({})
        except TypeError as error:
            raise SpecError("agent", f"{text} must take one argument, the task: {error}") from None
    agent: Agent = found
    return agent


def variables(url: str, key: str) -> dict[str, str]:
    """Return the environment variables by which clients find the model."""
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}


def run(agent: Agent, task: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    """Call an agent; return the parts of its `reward` by name, and None for no reward.

    `given`: environment variables. A proxy is not used for the addresses of this machine. Raises
    EnvironmentFault for a reward that is no number.
    """
    os.environ.update(given)
    local = f"{_LOCAL},{urlsplit(given['OPENAI_BASE_URL']).hostname}"
    for name in ("NO_PROXY", "no_proxy"):
        known = os.environ.get(name)
        if known is None or local not in known:
            os.environ[name] = local if not known else f"{known},{local}"
    found = settled(agent(dict(task)))
    if found is None:
        return {"reward": None}
    if not isinstance(found, Mapping):
        return {"reward": {"": number_of("the reward of the agent", found)}}
    if not all(isinstance(one, str) and one.isprintable() and len(one) <= 80 for one in found):
        raise EnvironmentFault(
            f"the names of rewards must be printable text of at most 80 characters, got "
            f"{ascii(list(found))[:200]}"
        )
    if not found or len(found) > MOST_PARTS:
        raise EnvironmentFault(
            f"the rewards of the agent must be 1 to {MOST_PARTS} numbers, got {len(found)}"
        )
    return {
        "reward": {
            name: number_of(f"the reward {name!r} of the agent", one) for name, one in found.items()
        }
    }
