"""Calls rewards as GRPOTrainer of TRL does: with keywords, one list item per completion.

Imports transformers in its function.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import JobFailed, SpecError
from ..files import umask
from ..user_code import tracebacks
from .problems import columns_of
from .prompts import Prompt
from .rewards import Reward
from .user_rewards import NOT_PASSED, KeywordReward

_Call = Callable[[], Coroutine[Any, Any, list[float | None]]]


@dataclass(frozen=True)
class Scored:
    """What the rewards return for B completions.

    `scores`: a number or None of each completion by each reward, B lists of R. `metrics`: the
    values passed to `log_metric`, by name. `extra`: the columns passed to `log_extra`.
    """

    scores: list[list[float | None]]
    metrics: dict[str, list[float]]
    extra: list[str]


class RewardCalls:
    """The rewards of a job by name; `prompts`: those whose completions may be scored.

    Async rewards run concurrently, all calls in one event loop. A context manager, which closes it.
    """

    def __init__(
        self, rewards: Mapping[str, Reward | KeywordReward], prompts: Sequence[Prompt]
    ) -> None:
        self.rewards = rewards
        self._columns = columns_of(prompt.columns for prompt in prompts)
        self._loop = asyncio.Runner()

    def __enter__(self) -> RewardCalls:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()

    def score(
        self,
        rows: Sequence[Prompt],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        state: Mapping[str, Any] | None = None,
    ) -> Scored:
        """Score completions of `rows`, their prompts. `state`: the fields of TRL's trainer_state.

        Raises JobFailed for an error of a reward.
        """
        metrics: dict[str, list[float]] = defaultdict(list)
        extra: dict[str, None] = {}
        given = {
            "trainer_state": _trainer_state(state),
            "log_extra": lambda column, values: extra.setdefault(str(column)),
            "log_metric": lambda name, value: metrics[str(name)].append(float(value)),
        }
        found: list[list[float | None]] = []
        waiting: dict[int, _Call] = {}
        for reward in self.rewards.values():
            scores: Sequence[float | None] = []
            if isinstance(reward, KeywordReward):
                passed = _as_trl_passes(rows, completions, completion_ids, self._columns)
                if reward.is_async:
                    waiting[len(found)] = partial(reward.asynchronously, **passed, **given)
                else:
                    scores = reward(**passed, **given)
            else:
                scores = reward(
                    [row.text for row in rows], list(completions), [row.answer for row in rows]
                )
            found.append(list(scores))
        if waiting:
            with umask.users():
                awaited = self._loop.run(_gathered(waiting.values()))
            for number, scores in zip(waiting, awaited, strict=True):
                found[number] = scores
        by_completion = [list(scores) for scores in zip(*found, strict=True)]
        return Scored(by_completion, dict(metrics), list(extra))


async def _gathered(calls: Iterable[_Call]) -> list[list[float | None]]:
    """Make the calls concurrently; when one fails, the others are canceled."""
    tasks = [asyncio.create_task(call()) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _trainer_state(fields: Mapping[str, Any] | None) -> Any:
    if fields is None:
        return None
    from transformers import TrainerState

    return TrainerState(**fields)


def _as_trl_passes(
    rows: Sequence[Prompt],
    texts: Sequence[str],
    ids: Sequence[Sequence[int]],
    columns: Sequence[str],
) -> dict[str, Any]:
    """Return what TRL would pass of completions and of a dataset with all columns.

    Chats are lists of messages in TRL, and so are their completions. All are copies: what a reward
    does to them changes neither the training nor a later call.
    """
    chats = [row.messages is not None for row in rows]
    prompts = [row.text if row.messages is None else deepcopy(row.messages) for row in rows]
    completions = [
        [{"role": "assistant", "content": text}] if is_chat else text
        for text, is_chat in zip(texts, chats, strict=True)
    ]
    passed = [name for name in columns if name != NOT_PASSED]
    return {
        **{name: [deepcopy(row.columns.get(name)) for row in rows] for name in passed},
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [list(one) for one in ids],
    }


def answered(answer: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Let a process that runs rewards report their errors in its answers, as `error`."""

    def found(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"found": answer(request)}
        # Also SystemExit: it ends the reward, not the process.
        except (Exception, SystemExit) as error:
            is_named = isinstance(error, JobFailed | SpecError)
            return {"error": str(error) if is_named else tracebacks.reason(error)}

    return found
