"""Plays episodes in environments: an environment opens each, and answers to every turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..files.chats import Messages
from .episodes import (
    ANSWERED,
    LENGTH,
    MAX_TURNS,
    TERMINATED,
    TRUNCATED,
    Episode,
    Key,
    Player,
    Policy,
    Rules,
)
from .pool import Answer, Failure, Pool
from .turns import Turns


class EnvironmentPlayer(Player):
    """Plays the episodes of a step.

    `numbers` returns those that decide the tokens of a turn, by attempt and turn. `calls` returns
    the tools that a turn calls, as `ToolEnvironment.act` takes them, none for an answer; None where
    an action is the text itself. `others`: as of Player.
    """

    def __init__(
        self,
        pool: Pool,
        policy: Policy,
        turns: Turns,
        rules: Rules,
        *,
        numbers: Callable[[Key, int], Any],
        calls: Callable[[Any, str | None], list[dict[str, Any]]] | None = None,
        **others: Any,
    ) -> None:
        super().__init__(pool, policy, rules, **others)
        self._turns = turns
        self._numbers = numbers
        self._calls = calls
        self._called: dict[Key, list[str]] = {}  # the tools that its latest turn has called
        self._begun: set[Key] = set()  # those that the policy has begun

    def _start(self, episode: Episode) -> None:
        task = self._tasks[episode.key.task]
        self._pool.reset(episode.key, seed=task.seed, row=task.row)

    def _answered(self, episode: Episode, answer: Answer) -> None:
        if answer.request == "reset":
            self._open(episode, answer)
        elif answer.request == "act":
            self._observe(episode, answer)
        else:
            reward = answer.found["reward"]
            episode.reward = episode.reward if reward is None else reward
            self._end(episode)

    def _open(self, episode: Episode, answer: Answer) -> None:
        key, observation = episode.key, answer.found["observation"]
        opening = _opening(self._tasks[key.task].prompt, observation)
        episode.prompt = self._turns.prompt(opening, self._tasks[key.task].name)
        episode.messages.append(opening)
        capacity = self._rules.capacity(len(episode.prompt))
        if len(episode.prompt) >= capacity:
            words = (
                f"the prompt has {len(episode.prompt)} tokens, and the model takes "
                f"{self._rules.positions}"
            )
            self._pool.release(key)
            self._leave_out(episode, Failure("environment_error", words), LENGTH)
            return
        self._policy.begin(key, episode.prompt, capacity=capacity)
        self._begun.add(key)
        self._go_on(episode)

    def _go_on(self, episode: Episode, given: Sequence[int] = ()) -> None:
        key = episode.key
        numbers = self._numbers(key, episode.turns)
        if not self._policy.go_on(key, numbers, given):
            self._finish(episode, LENGTH)
        elif given:
            episode.written.append(self._policy.given(given))

    def _written(self, key: Any, turn: Any) -> None:
        """Let the environment answer to a turn, unless that ends the episode."""
        episode = self._playing[key]
        episode.turns += 1
        episode.written.append(turn.segment)
        episode.messages.append(turn.text)
        if turn.reason == "length":
            self._finish(episode, LENGTH)
            return
        action: Any = turn.text
        if self._calls is not None:
            action = self._calls(turn, self._tasks[key.task].name)
            self._called[key] = [call["name"] for call in action]
            if not action:
                self._finish(episode, ANSWERED)
                return
        episode.asked_at = time.monotonic()
        self._pool.act(key, action)

    def _observe(self, episode: Episode, answer: Answer) -> None:
        found = answer.found
        if "reward" in found:
            episode.reward = (episode.reward or 0.0) + found["reward"]
            episode.rewards.append(found["reward"])
        episode.success = found.get("info", {}).get("success", episode.success)
        if found.get("terminated"):
            self._finish(episode, TERMINATED)
        elif found.get("truncated"):
            self._finish(episode, TRUNCATED)
        elif episode.turns == self._rules.max_turns:
            self._finish(episode, MAX_TURNS)
        else:
            observation = found["observation"]
            episode.messages.append(observation)
            calls = self._called.get(episode.key, ())
            self._go_on(episode, self._turns.observed(observation, calls))

    def _finish(self, episode: Episode, reason: str) -> None:
        """End an episode, once the environment has said what it is worth."""
        episode.reason = reason
        if self._calls is None:
            episode.reward = episode.reward or 0.0
            self._end(episode)
        else:
            episode.asked_at = time.monotonic()
            self._pool.rewards(episode.key)

    def _drop(self, key: Key) -> None:
        self._called.pop(key, None)
        if key in self._begun:
            self._begun.remove(key)
            self._policy.end(key)


def _opening(prompt: str | Messages | None, observation: Any) -> str | Messages:
    """Return what the policy sees first: the prompt of the row, and the first observation.

    As in TRL, text that the environment adds belongs to the last message of the user.
    """
    if prompt is None or prompt == "":
        return "" if observation is None else observation
    if observation is None:
        return prompt
    if isinstance(prompt, str) and isinstance(observation, str):
        return prompt + observation
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not isinstance(observation, str):
        return [*messages, *observation]
    at = max((n for n, one in enumerate(messages) if one["role"] == "user"), default=None)
    if at is None:
        return [*messages, {"role": "user", "content": observation}]
    messages[at] = {**messages[at], "content": messages[at]["content"] + observation}
    return messages
