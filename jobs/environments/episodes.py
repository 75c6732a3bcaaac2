"""Plays episodes: the policy writes a turn, the environment answers, until one of them ends it.

No episode waits for another one: a turn is computed as soon as its observation is there. The
results come in the order of the tasks, and do not depend on which environment was faster. Imports
no torch: the policy is given (`engine.dialogues.Dialogues`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..files.chats import Messages
from .pool import Answer, Failure, Pool
from .tasks import Task
from .turns import Turns

# Why an episode has ended. Those of a failed one are the reasons of `pool.Failure`.
TERMINATED, TRUNCATED = "terminated", "truncated"  # by the environment
ANSWERED = "answered"  # a turn without a call, where actions are calls
MAX_TURNS = "max_turns"
LENGTH = "length"  # of a turn, or of all tokens
TIMEOUT = "timeout"  # a time limit, where that has a reward

_LOOK_S = 0.5  # between two checks while environments work


class Key(NamedTuple):
    """An attempt at an episode: member of the group of a task."""

    task: int
    member: int
    attempt: int


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The limits of an episode: its turns, the tokens of a turn, those after the prompt.

    `positions`: tokens that the model takes, None for no limit. `attempts`: how often it may begin
    if it fails for a reason of the environment's. `timeout_reward`: of an episode that exceeds a
    time limit; None: it has failed.
    """

    max_turns: int = 16
    max_turn_tokens: int
    max_tokens: int
    positions: int | None = None
    attempts: int = 2
    timeout_reward: float | None = None


@dataclass
class Episode:
    """An episode that has ended.

    `written`: the segments after the prompt, those of the policy and those that it was given.
    `reward`: the sum over its steps, or the environment's own; None: it has failed, or gives none.
    """

    key: Key
    prompt: list[int] = field(default_factory=list)
    written: list[Any] = field(default_factory=list)  # engine.rollouts.Segment
    messages: list[Any] = field(default_factory=list)  # texts and observations, for people
    rewards: list[float] = field(default_factory=list)  # of the steps, where each has one
    reward: float | None = None
    success: bool | None = None
    turns: int = 0
    reason: str = ""
    failure: Failure | None = None
    environment_s: float = 0.0
    asked_at: float = 0.0  # when the environment got its latest request
    has_dialogue: bool = False  # whether the policy has begun

    @property
    def opening(self) -> str:
        """What the policy saw first, as text."""
        return _text(self.messages[0]) if self.messages else ""

    @property
    def transcript(self) -> str:
        """What followed, of the policy and of the environment, as text."""
        return "".join(map(_text, self.messages[1:]))

    @property
    def shown_turns(self) -> list[dict[str, Any]]:
        """What followed, by who wrote it: `role`, `content`, and the `reward` of the step.

        Roles are those of chats, "assistant" for the policy; text of an environment has the role
        "environment".
        """
        found: list[dict[str, Any]] = []
        for number, one in enumerate(self.messages[1:]):
            if number % 2 == 0:
                turn = number // 2
                reward = {"reward": self.rewards[turn]} if turn < len(self.rewards) else {}
                found.append({"role": "assistant", "content": one, **reward})
            elif isinstance(one, list):
                found += [{"role": m["role"], "content": m.get("content", "")} for m in one]
            else:
                found.append({"role": "environment", "content": one or ""})
        return found


def _text(observation: Any) -> str:
    """Return text, or the contents of messages, each in a line after its role."""
    if isinstance(observation, list):
        return "".join(f"\n[{one['role']}] {one.get('content', '')}\n" for one in observation)
    return observation or ""


class Policy(Protocol):
    """What writes the turns, see Dialogues."""

    @property
    def is_idle(self) -> bool: ...

    def begin(self, key: Any, prompt: Sequence[int], *, capacity: int) -> None: ...

    def go_on(self, key: Any, numbers: Any, given: Sequence[int] = ()) -> int: ...

    def step(self) -> dict[Any, Any]: ...

    def given(self, ids: Sequence[int]) -> Any: ...

    def end(self, key: Any) -> None: ...


class Player:
    """Plays the episodes of a step.

    `numbers` returns those that decide the tokens of a turn, by attempt and turn. `calls` returns
    the tools that a turn calls, as `ToolEnvironment.act` takes them, none for an answer; None where
    an action is the text itself. `known`: attempts that have been played before, which are not
    played again. `on_end` gets each attempt when it ends or fails, in any order. `check` is called
    at least every half second; what it raises ends the playing.
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
        known: Mapping[Key, Episode] | None = None,
        on_end: Callable[[Episode], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._turns = turns
        self._rules = rules
        self._numbers = numbers
        self._calls = calls
        self._known = {} if known is None else known
        self._on_end = on_end
        self._check = check
        self._tasks: Sequence[Task] = ()
        self._playing: dict[Key, Episode] = {}
        self._called: dict[Key, list[str]] = {}  # the tools that its latest turn has called
        self._ended: dict[tuple[int, int], Episode] = {}
        self.failed: list[Episode] = []  # attempts that were repeated
        self.waited_s = 0.0  # in which environments worked and no turn was being written

    def play(
        self, tasks: Sequence[Task], groups: Sequence[tuple[int, range]]
    ) -> list[list[Episode]]:
        """Play groups of episodes; return them by group, in the order of members.

        `groups`: of each the number of its task, and those of its members.
        """
        self._tasks, self._ended = tasks, {}
        for task, of_task in groups:
            for member in of_task:
                self._begin(Key(task, member, 0))
        while self._playing:
            if self._check is not None:
                self._check()
            if self._policy.is_idle:
                began = time.monotonic()
                answers = self._pool.poll(None if self._check is None else _LOOK_S)
                self.waited_s += time.monotonic() - began
            else:
                for key, turn in self._policy.step().items():
                    self._act(key, turn)
                answers = self._pool.poll(0)
            for answer in answers:
                self._answer(answer)
        return [[self._ended[task, member] for member in of_task] for task, of_task in groups]

    def _begin(self, key: Key) -> None:
        if (known := self._known.get(key)) is not None:
            if known.failure is not None and key.attempt + 1 < self._rules.attempts:
                self.failed.append(known)
                self._begin(key._replace(attempt=key.attempt + 1))
            else:
                self._ended[key.task, key.member] = known
            return
        self._playing[key] = Episode(key, asked_at=time.monotonic())
        task = self._tasks[key.task]
        self._pool.reset(key, seed=task.seed, row=task.row)

    def _answer(self, answer: Answer) -> None:
        """Go on with what an environment has answered."""
        key: Key = answer.episode  # type: ignore[assignment]
        episode = self._playing[key]
        episode.environment_s += time.monotonic() - episode.asked_at
        if answer.failure is not None:
            self._fail(episode, answer.failure)
        elif answer.request == "reset":
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
        capacity, positions = len(episode.prompt) + self._rules.max_tokens, self._rules.positions
        if positions is not None:
            capacity = min(capacity, positions)
        if len(episode.prompt) >= capacity:
            words = f"the prompt has {len(episode.prompt)} tokens, and the model takes {positions}"
            self._pool.release(key)
            self._leave_out(episode, Failure("environment_error", words))
            return
        self._policy.begin(key, episode.prompt, capacity=capacity)
        episode.has_dialogue = True
        self._go_on(episode)

    def _go_on(self, episode: Episode, given: Sequence[int] = ()) -> None:
        key = episode.key
        numbers = self._numbers(key, episode.turns)
        if not self._policy.go_on(key, numbers, given):
            self._finish(episode, LENGTH)
        elif given:
            episode.written.append(self._policy.given(given))

    def _act(self, key: Key, turn: Any) -> None:
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

    def _end(self, episode: Episode) -> None:
        self._pool.release(episode.key)
        self._leave(episode)

    def _fail(self, episode: Episode, failure: Failure) -> None:
        """Begin a failed episode again in another process, or leave it out."""
        reward = self._rules.timeout_reward
        if failure.reason == TIMEOUT and reward is not None and episode.turns:
            episode.reason, episode.reward = TIMEOUT, reward
            self._leave(episode)
            return
        key = episode.key
        if key.attempt + 1 == self._rules.attempts:
            self._leave_out(episode, failure)
            return
        episode.failure, episode.reason, episode.reward = failure, failure.reason, None
        self._forget(episode)
        self.failed.append(episode)
        self._begin(key._replace(attempt=key.attempt + 1))

    def _leave_out(self, episode: Episode, failure: Failure) -> None:
        episode.failure, episode.reason, episode.reward = failure, failure.reason, None
        self._leave(episode)

    def _leave(self, episode: Episode) -> None:
        self._forget(episode)
        self._ended[episode.key.task, episode.key.member] = episode

    def _forget(self, episode: Episode) -> None:
        """Take an attempt that has ended or failed from those that are played."""
        del self._playing[episode.key]
        self._called.pop(episode.key, None)
        if episode.has_dialogue:
            self._policy.end(episode.key)
        if self._on_end is not None:
            self._on_end(episode)


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
