"""The user's reward functions of episodes, called in the process of the environment.

They are called as TRL calls them with an environment_factory: by keywords, each a list of one item,
among them `environments` with the user's own object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from ..rewards.user_rewards import NOT_PASSED, KeywordReward, PositionalReward, imported
from .classes import settled
from .interface import ENVIRONMENTS


class EpisodeRewards:
    """The functions of a job: `names`, each module:function.

    `columns`: of the data, which the functions may take as keywords. Raises SpecError.
    """

    def __init__(self, names: Sequence[str], columns: Sequence[str]) -> None:
        self._columns = [name for name in columns if name != NOT_PASSED]
        self._functions = {name: imported(name, [*self._columns, ENVIRONMENTS]) for name in names}

    def score(
        self,
        instance: Any,
        *,
        prompt: Any,
        completion: Any,
        text: str,
        completion_ids: list[int],
        row: Mapping[str, Any],
    ) -> dict[str, float | None]:
        """Return what each function gives an episode, None for no score.

        `prompt` and `completion`: text, or messages with a chat template; `text`: of both kinds of
        completion, for functions with the arguments (prompts, completions, answers). Raises
        JobFailed for an error of a function.
        """
        found: dict[str, float | None] = {}
        for name, function in self._functions.items():
            if isinstance(function, PositionalReward):
                answer = row.get("answer")
                opening = prompt if isinstance(prompt, str) else prompt[-1].get("content", "")
                (found[name],) = function(
                    [opening], [text], [answer if isinstance(answer, str) else None]
                )
                continue
            given: dict[str, Any] = {
                column: [deepcopy(row.get(column))] for column in self._columns
            }
            given |= {
                "prompts": [deepcopy(prompt)],
                "completions": [deepcopy(completion)],
                "completion_ids": [list(completion_ids)],
                ENVIRONMENTS: [instance],
                "trainer_state": None,
                "log_extra": _refuse,
                "log_metric": _refuse,
            }
            (found[name],) = _called(function, given)
        return found


def _called(function: KeywordReward, given: Mapping[str, Any]) -> list[float | None]:
    found = function.asynchronously(**given) if function.is_async else function(**given)
    scores: list[float | None] = settled(found)
    return scores


def _refuse(*_: Any) -> None:
    raise TypeError("log_extra and log_metric are not there with an environment")
