"""Plays episodes in environments: an environment opens each, and answers to every turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..files.chats import Messages
from ..models import image_parts
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
    of_images,
)
from .interface import EnvironmentFault
from .pool import Answer, Failure, Pool
from .turns import Turns, messages_of


class EnvironmentPlayer(Player):
    """Plays the episodes of a step.

    `numbers` returns those that decide the tokens of a turn, by attempt and turn. `calls` returns
    the message of a turn, whose `tool_calls` are the action; None where an action is the text
    itself. `weights`: of the reward functions, by name. `others`: as of Player.
    """

    def __init__(
        self,
        pool: Pool,
        policy: Policy,
        turns: Turns,
        rules: Rules,
        *,
        numbers: Callable[[Key, int], Any],
        calls: Callable[[Any, str | None], dict[str, Any]] | None = None,
        weights: Mapping[str, float] | None = None,
        **others: Any,
    ) -> None:
        super().__init__(pool, policy, rules, **others)
        self._turns = turns
        self._numbers = numbers
        self._calls = calls
        self._weights = weights or {}
        self._called: dict[Key, list[str]] = {}  # the tools that its latest turn has called
        self._chats: dict[Key, list[dict[str, Any]]] = {}  # what followed the prompt, as messages
        self._begun: set[Key] = set()  # those that the policy has begun

    def _start(self, episode: Episode) -> None:
        task = self._tasks[episode.key.task]
        self._pool.reset(episode.key, seed=task.seed, row=task.row)

    def _answered(self, episode: Episode, answer: Answer) -> None:
        try:
            self._continue(episode, answer)
        except EnvironmentFault as error:  # an image that cannot be read
            self._pool.release(episode.key)
            self._fail(episode, Failure("environment_error", str(error)))

    def _continue(self, episode: Episode, answer: Answer) -> None:
        if answer.request == "reset":
            self._open(episode, answer)
        elif answer.request == "act":
            self._observe(episode, answer)
        else:
            self._score(episode, answer.found["reward"], answer.found["parts"])
            self._end(episode)

    def _open(self, episode: Episode, answer: Answer) -> None:
        key, observation = episode.key, answer.found["observation"]
        opening = _opening(self._tasks[key.task].prompt, observation)
        opening, urls = _split(opening)
        ids = self._turns.prompt(opening, self._tasks[key.task].name)
        episode.prompt, images = self._seen(ids, urls)
        episode.messages.append(_shown(opening, images))
        self._chats[key] = []
        capacity = self._rules.capacity(len(episode.prompt))
        if len(episode.prompt) >= capacity:
            words = (
                f"the prompt has {len(episode.prompt)} tokens, and the model takes "
                f"{self._rules.positions}"
            )
            self._pool.release(key)
            self._leave_out(episode, Failure("environment_error", words), LENGTH)
            return
        self._policy.begin(key, episode.prompt, capacity=capacity, **of_images(images))
        self._begun.add(key)
        self._go_on(episode)

    def _go_on(
        self, episode: Episode, given: Sequence[int] = (), images: Sequence[Any] = ()
    ) -> None:
        key = episode.key
        numbers = self._numbers(key, episode.turns)
        if not self._policy.go_on(key, numbers, given, **of_images(images)):
            self._finish(episode, LENGTH)
        elif given:
            episode.written.append(self._policy.given(given))

    def _written(self, key: Any, turn: Any) -> None:
        """Let the environment answer to a turn, unless that ends the episode."""
        episode = self._playing[key]
        episode.turns += 1
        episode.written.append(turn.segment)
        episode.messages.append(turn.text)
        is_cut = turn.reason == "length"
        message, action = {"role": "assistant", "content": turn.text}, turn.text
        if self._calls is not None and not is_cut:
            message = self._calls(turn, self._tasks[key.task].name)
            action = [call["function"] for call in message.get("tool_calls", ())]
            self._called[key] = [call["name"] for call in action]
        self._chats[key].append(message)
        if is_cut:
            self._finish(episode, LENGTH)
        elif self._calls is not None and not action:
            self._finish(episode, ANSWERED)
        else:
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
            observation, urls = _split(found["observation"])
            calls = self._called.get(episode.key, ())
            given, images = self._seen(self._turns.observed(observation, calls), urls)
            shown = _shown(observation, images)
            episode.messages.append(shown)
            self._chats[episode.key] += messages_of(shown)
            self._go_on(episode, given, images)

    def _finish(self, episode: Episode, reason: str) -> None:
        """End an episode, once the environment has said what it is worth."""
        episode.reason = reason
        if self._calls is None:
            episode.reward = episode.reward or 0.0
        if self._calls is None and not self._weights:
            self._end(episode)
        else:
            episode.asked_at = time.monotonic()
            self._pool.rewards(episode.key, self._played(episode) if self._weights else {})

    def _played(self, episode: Episode) -> dict[str, Any]:
        """Return an episode as reward functions get it: chats as messages."""
        task = self._tasks[episode.key.task]
        opening, is_chat = episode.messages[0], self._turns.is_chat
        return {
            "prompt": messages_of(opening) if is_chat else episode.opening,
            "completion": self._chats[episode.key] if is_chat else episode.transcript,
            "text": episode.transcript,
            "completion_ids": [token for one in episode.written for token in one.ids],
            "row": task.row,
        }

    def _score(
        self, episode: Episode, given: float | None, scores: Mapping[str, float | None]
    ) -> None:
        """Add up what the environment gives and the weighted scores; None if there is neither."""
        given = episode.reward if given is None else given
        known = {name: score for name, score in scores.items() if score is not None}
        if not self._weights:
            episode.reward = given
            return
        episode.parts = known if given is None else {**known, "environment": given}
        weighted = [self._weights[name] * score for name, score in known.items()]
        episode.reward = sum(weighted, given or 0.0) if episode.parts else None

    def _drop(self, key: Key) -> None:
        self._called.pop(key, None)
        self._chats.pop(key, None)
        if key in self._begun:
            self._begun.remove(key)
            self._policy.end(key)


def _split(observation: Any) -> tuple[Any, list[str]]:
    """Return an observation as templates take it, and the URLs of its images."""
    if isinstance(observation, list):
        return image_parts.split(observation)
    return observation, []


def _shown(observation: Any, images: Sequence[Any]) -> Any:
    """Return an observation that was split for people."""
    if isinstance(observation, list):
        return image_parts.shown(observation, [image.size for image in images])
    return observation


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
