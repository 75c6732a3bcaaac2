"""An environment as a job uses it: its processes, the tokens between turns, the calls of tools.

The same for trainings and evaluations. Imports transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..context import WarmModel
from ..errors import JobFailed, SpecError
from ..models.architectures import positions_in
from .calls import CallReader
from .classes import TOOLS
from .episodes import Rules
from .options import EnvironmentSpec
from .pool import Pool, described
from .tasks import Task
from .turns import ChatTurns, RawTurns, Turns


@dataclass(frozen=True, kw_only=True)
class Playing:
    """An environment, and how a model plays in it.

    `calls`: what reads the calls of tools; None where an action is text.
    """

    pool: Pool
    turns: Turns
    rules: Rules
    tasks: Sequence[Task]
    calls: CallReader | None

    @property
    def reader(self) -> Callable[[Any, str | None], list[dict[str, Any]]] | None:
        """What `Player` takes as `calls`."""
        return None if self.calls is None else self.calls.of


@contextmanager
def playing(
    spec: EnvironmentSpec,
    warm: WarmModel,
    folders: Sequence[str],
    *,
    ends: Collection[int],
    tasks: Sequence[Task],
    most_tokens: int,
    episodes: int,
    ranks: int = 1,
) -> Iterator[Playing]:
    """Yield the environment of a job; its processes end with this block.

    `folders`: of the user's modules. `ends`: tokens that end a turn. `most_tokens`: after the
    prompt of an episode. `episodes`: that are played together, by all `ranks`. Raises JobFailed.
    """
    tokenizer, calls = warm.tokenizer, None
    is_chat = bool(tokenizer.chat_template)
    if is_chat and spec.stop:  # observations would follow turns that no end token has closed
        raise JobFailed(
            f"stop: must be unset for {warm.name}, whose chat template ends turns, got "
            f"{spec.stop[0]!r}"
        )
    with spec.pool(folders, episodes, ranks) as pool:
        tools = None
        if pool.interface == TOOLS:
            if not is_chat:
                raise JobFailed(
                    "environment: tools need a model with a chat template, and "
                    f"{warm.name} has none"
                )
            tools = _tools(spec, folders)
            calls = CallReader(tokenizer, tools, warm.response_template)
        turns: Turns = RawTurns(tokenizer)
        if is_chat:
            turns = ChatTurns(tokenizer, ends=ends, tools=tools)
        yield Playing(
            pool=pool,
            turns=turns,
            rules=spec.rules(most_tokens, positions_in(warm.model.config)),
            tasks=tasks,
            calls=calls,
        )


def _tools(spec: EnvironmentSpec, folders: Sequence[str]) -> dict[str | None, list[dict[str, Any]]]:
    """Return the JSON schemas of the tools of each class. Raises JobFailed."""
    try:
        found = described(str(spec.environment), folders, spec.environment_reset_timeout)
    except SpecError as error:
        raise JobFailed(str(error)) from error
    return found.tools or {}
