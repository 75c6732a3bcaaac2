"""Calls of TRL's form: several async rewards, and rewards that change what they are given."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from warmd.jobs.errors import JobFailed
from warmd.jobs.rewards.prompts import Prompt
from warmd.jobs.rewards.reward_calls import RewardCalls, Scored
from warmd.jobs.rewards.user_rewards import KeywordReward

CHAT = [{"role": "user", "content": "1+1="}]


def score(calls: RewardCalls, prompt: Prompt, ids: list[list[int]]) -> Scored:
    return calls.score([prompt] * len(ids), ["2"] * len(ids), ids)


def calls_of(*functions: Any) -> tuple[RewardCalls, Prompt]:
    prompt = Prompt("1+1=", [1], "2", 1, False, {"tests": ["a"]}, [*CHAT])
    rewards = {one.__name__: KeywordReward(one.__name__, one) for one in functions}
    return RewardCalls(rewards, [prompt]), prompt


@pytest.fixture
def private_umask(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("_WARMD_UMASK", "022")
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("private_umask")
def test_async_rewards_that_end_in_any_order_leave_the_umask_of_the_daemon():
    seen: list[int] = []

    def umask() -> int:
        current = os.umask(0o777)
        os.umask(current)
        return current

    async def first(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0.01)
        seen.append(umask())
        return [1.0] * len(completions)

    async def second(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0.02)
        seen.append(umask())
        return [1.0] * len(completions)

    calls, prompt = calls_of(first, second)
    with calls:
        score(calls, prompt, [[3], [4]])
    assert seen == [0o022, 0o022]
    assert umask() == 0o077


def test_when_an_async_reward_fails_the_others_end_with_the_call():
    ended: list[str] = []

    async def fails(**_: Any) -> list[float]:
        await asyncio.sleep(0)
        raise ValueError("out of luck")

    async def waits(**_: Any) -> list[float]:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("waits")
        return []

    calls, prompt = calls_of(waits, fails)
    with calls:
        with pytest.raises(JobFailed, match="out of luck"):
            score(calls, prompt, [[3]])
        assert ended == ["waits"]


def test_after_a_reward_that_raises_no_async_one_is_left_without_a_call():
    called: list[bool] = []

    async def asks(completions: list[str], **_: Any) -> list[float]:
        called.append(True)
        return [1.0] * len(completions)

    def fails(**_: Any) -> list[float]:
        raise ValueError("out of luck")

    calls, prompt = calls_of(asks, fails)
    with calls, pytest.raises(JobFailed, match="out of luck"):
        score(calls, prompt, [[3]])  # a coroutine that is never awaited would be a warning
    assert not called


def test_what_a_reward_does_to_its_arguments_changes_nothing_else():
    def changes(prompts: Any, completion_ids: Any, tests: Any, **_: Any) -> list[float]:
        found = float(len(tests[0]) + len(prompts[0]) + len(completion_ids[0]))
        for part in (prompts[0], completion_ids[0], tests[0]):
            part.clear()
        return [found] * len(prompts)

    calls, prompt = calls_of(changes)
    ids = [[3, 4], [5, 6]]
    with calls:
        assert score(calls, prompt, ids).scores == [[4.0], [4.0]]
        assert score(calls, prompt, ids).scores == [[4.0], [4.0]]
    assert (ids, prompt.messages, prompt.columns) == ([[3, 4], [5, 6]], CHAT, {"tests": ["a"]})
