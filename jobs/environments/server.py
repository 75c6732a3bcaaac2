"""The process of an environment or agent: answers `load`, `reset`, `act`, `run`, `close`, ….

Run by `pool`. Its output goes to the log of the job. It has a process group of its own, so that
what the user's code starts can be ended with it.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from ..errors import JobFailed, SpecError
from ..files import umask
from ..user_code import tracebacks
from ..user_code.child_server import parent, serve
from ..user_code.modules import digests, own_modules
from . import agents
from .classes import resolve
from .interface import AGENT, Environment, EnvironmentFault
from .rewards import EpisodeRewards


class _Server:
    """Answers the requests of one pool."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._makers: Mapping[str | None, Any] = {}
        self._instances: dict[str | None, Environment] = {}
        self._current: Environment | None = None
        self._agent: agents.Agent | None = None
        self._functions: EpisodeRewards | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do one request. What the user's code raises is the `error` of the answer."""
        act = getattr(self, f"_{request.pop('do')}")
        try:
            found: dict[str, Any] = act(**request)
        except EnvironmentFault as fault:
            return {"error": str(fault)}
        except SpecError as error:
            return {"error": error.problem, "field": error.field}
        except JobFailed as error:  # of a reward function, which it names
            return {"error": str(error)}
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            return {"error": tracebacks.reason(error), "trace": tracebacks.trace(error)}
        finally:
            sys.stdout.flush()
        return found

    def _load(
        self,
        option: str,
        name: str,
        folders: list[str],
        rewards: list[str],
        columns: list[str],
    ) -> dict[str, Any]:
        self._stack.enter_context(own_modules(folders))
        if option == AGENT:
            interface, self._agent = AGENT, agents.resolve(name)
        else:
            interface, self._makers = resolve(name)
        if rewards:
            self._functions = EpisodeRewards(rewards, columns)
        return {"interface": interface, "sources": digests()}

    def _tools(self) -> dict[str, Any]:
        """Return the tools of each class, in a list of [name, schemas]."""
        found = []
        for name, make in self._makers.items():
            made = make()
            if self._functions is None:
                made.check_reward()
            found.append([name, made.tools()])
        return {"tools": found}

    def _reset(self, seed: int, row: dict[str, Any]) -> dict[str, Any]:
        name = row.get("environment") if None not in self._makers else None
        if name not in self._makers:
            known = ", ".join(str(one) for one in self._makers)
            raise EnvironmentFault(f"the column environment must be one of {known}, got {name!r}")
        _seed_everything(seed)
        if name not in self._instances:
            self._instances[name] = self._makers[name]()
        self._current = self._instances[name]
        return self._current.reset(seed, row)

    def _act(self, action: Any) -> dict[str, Any]:
        assert self._current is not None
        return self._current.act(action)

    def _run(self, seed: int, row: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
        assert self._agent is not None
        _seed_everything(seed)
        return agents.run(self._agent, row, variables)

    def _rewards(self, played: dict[str, Any]) -> dict[str, Any]:
        assert self._current is not None
        reward, parts = self._current.rewards(), {}
        if self._functions is not None:
            parts = self._functions.score(self._current.instance, **played)
        return {"reward": reward, "parts": parts}

    def _close(self) -> dict[str, Any]:
        while self._instances:
            _, instance = self._instances.popitem()
            instance.close()
        return {}


def _seed_everything(seed: int) -> None:
    """Seed the global generators, for environments that use them."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def main() -> None:
    os.setsid()
    os.umask(umask.of_user())  # all that this process does is the user's
    with ExitStack() as stack:
        serve(_Server(stack).answer, parent())


if __name__ == "__main__":
    main()
