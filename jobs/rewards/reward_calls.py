"""Adapts rewards to GRPOTrainer, which calls functions with keywords, one list item per completion.

TRL passes the columns of its dataset. Here that is the one column `row`, a Prompt, from which the
functions receive the arguments of each reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .problems import columns_of
from .prompts import Prompt
from .rewards import Reward
from .user_rewards import NOT_PASSED, KeywordReward


def as_trl_calls(
    rewards: Mapping[str, Reward | KeywordReward], prompts: Sequence[Prompt]
) -> list[Any]:
    """Return the rewards with TRL's signature; the columns are those of the prompts' records."""
    columns = columns_of(prompt.columns for prompt in prompts)
    return [_as_trl_reward(name, reward, columns) for name, reward in rewards.items()]


def _as_trl_reward(name: str, reward: Reward | KeywordReward, columns: Sequence[str]) -> Any:
    def by_position(
        prompts: list[str], completions: list[str], row: list[Prompt], **_: Any
    ) -> list[float]:
        assert not isinstance(reward, KeywordReward)
        return reward(prompts, completions, [one.answer for one in row])

    def by_keywords(row: list[Prompt], **keywords: Any) -> list[float | None]:
        assert isinstance(reward, KeywordReward)
        return reward(**_as_trl_passes(row, columns, keywords))

    async def asynchronously(row: list[Prompt], **keywords: Any) -> list[float | None]:
        assert isinstance(reward, KeywordReward)
        return await reward.asynchronously(**_as_trl_passes(row, columns, keywords))

    score: Any = by_position
    if isinstance(reward, KeywordReward):
        score = asynchronously if reward.is_async else by_keywords
    score.__name__ = name
    return score


def _as_trl_passes(
    rows: Sequence[Prompt], columns: Sequence[str], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keywords that TRL would pass for a dataset with all columns.

    Chats are lists of messages in TRL, and so are their completions.
    """
    texts = keywords["completions"]
    chats = [row.messages is not None for row in rows]
    prompts = [row.text if row.messages is None else row.messages for row in rows]
    completions = [
        [{"role": "assistant", "content": text}] if is_chat else text
        for text, is_chat in zip(texts, chats, strict=True)
    ]
    return {
        **{name: [row.columns.get(name) for row in rows] for name in columns if name != NOT_PASSED},
        **keywords,
        "prompts": prompts,
        "completions": completions,
    }
