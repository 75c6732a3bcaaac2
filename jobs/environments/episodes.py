"""Episodes, and what plays them: the policy writes turns, until something ends each episode.

`EnvironmentPlayer` lets an environment answer to each turn, `AgentPlayer` lets an agent request
turns. No episode waits for another one: a turn is computed as soon as it is due. The results come
in the order of the tasks, and do not depend on what was faster. Imports no torch: the policy is
given (`engine.dialogues.Dialogues`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..errors import JobFailed
from .interface import ENVIRONMENT
from .pool import Answer, Failure, Pool
from .tasks import Task

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

    def repeats(self, episode: Episode) -> bool:
        """Whether an attempt that is over is followed by another one.

        Not if it came to a limit that another one would come to as well: it ended by that.
        """
        failure = episode.failure
        is_last = episode.key.attempt + 1 == self.attempts
        return failure is not None and episode.reason == failure.reason and not is_last

    def capacity(self, prompt: int) -> int:
        """Return the most tokens of a context with so many in its prompt."""
        most = prompt + self.max_tokens
        return most if self.positions is None else min(most, self.positions)


@dataclass
class Episode:
    """An episode that has ended.

    `written`: the segments after the prompt, those of the policy and those that it was given.
    `messages`: for people; the opening, then what the policy wrote and what it was given, in turn.
    `reward`: the sum over its steps or parts, or the environment's own; None: it has failed, or
    gives none. `parts`: of the reward, by name.
    """

    key: Key
    prompt: list[int] = field(default_factory=list)
    written: list[Any] = field(default_factory=list)  # engine.rollouts.Segment
    messages: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # of the steps, where each has one
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    success: bool | None = None
    turns: int = 0
    reason: str = ""
    failure: Failure | None = None
    environment_s: float = 0.0
    asked_at: float = 0.0  # when the environment got its latest request

    @property
    def contexts(self) -> int:
        """The number of its contexts: an agent can have several."""
        return 1 + sum(one.prompt is not None for one in self.written)

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


# (tokens, one of them for each image; URLs) to all tokens and engine.request.Image of each image,
# as `engine.image_tokens.insert_image_tokens`. Raises JobFailed and EnvironmentFault.
InsertImages = Callable[[list[int], Sequence[str]], tuple[list[int], list[Any]]]


class Policy(Protocol):
    """What writes the turns, see `engine.dialogues.Dialogues` and `eval.episodes.EnginePolicy`.

    EnginePolicy, that of evaluations, also takes `images`, and `json_schema` or `regex` for a
    constrained turn. A training takes neither.
    """

    @property
    def is_idle(self) -> bool: ...

    def begin(self, key: Any, prompt: Sequence[int], *, capacity: int) -> None: ...

    def go_on(
        self, key: Any, numbers: Any, given: Sequence[int] = (), *, stop: Sequence[str] = ()
    ) -> int: ...

    def step(self) -> dict[Any, Any]: ...

    def given(self, ids: Sequence[int]) -> Any: ...

    def end(self, key: Any) -> None: ...


def of_images(images: Sequence[Any]) -> dict[str, Any]:
    """Return images as arguments for a Policy; {} for none, which every policy takes."""
    return {"images": images} if images else {}


class Player(ABC):
    """Plays the episodes of a step, whose environments or agents are processes of a pool.

    `known`: attempts that have been played before, which are not played again. `on_end` gets each
    attempt when it ends or fails, in any order. `check` is called at least every half second; what
    it raises ends the playing. `images`: None in a training, which takes none.
    """

    option = ENVIRONMENT  # that names what plays

    def __init__(
        self,
        pool: Pool,
        policy: Policy,
        rules: Rules,
        *,
        known: Mapping[Key, Episode] | None = None,
        on_end: Callable[[Episode], None] | None = None,
        check: Callable[[], None] | None = None,
        images: InsertImages | None = None,
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._rules = rules
        self._known = {} if known is None else known
        self._on_end = on_end
        self._check = check
        self._images = images
        self._tasks: Sequence[Task] = ()
        self._playing: dict[Key, Episode] = {}
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
                    self._written(key, turn)
                answers = self._pool.poll(0)
            for answer in answers:
                self._answer(answer)
            self._look()
        return [[self._ended[task, member] for member in of_task] for task, of_task in groups]

    @abstractmethod
    def _start(self, episode: Episode) -> None:
        """Let a process begin an episode."""

    @abstractmethod
    def _answered(self, episode: Episode, answer: Answer) -> None:
        """Continue an episode with what its process has answered."""

    @abstractmethod
    def _written(self, key: Any, turn: Any) -> None:
        """Continue with a turn that the policy has written; `key`: as the policy got it."""

    @abstractmethod
    def _drop(self, key: Key) -> None:
        """Forget what is kept of an episode while it is played."""

    def _look(self) -> None:  # noqa: B027
        """Do what else may be due."""

    def _seen(self, ids: list[int], urls: Sequence[str]) -> tuple[list[int], list[Any]]:
        """Return tokens, of which each image at `urls` has its number, and the images.

        Raises JobFailed in a training, which takes no images, and EnvironmentFault for an image
        that cannot be read.
        """
        if self._images is not None:
            return self._images(ids, urls)
        if urls:
            raise JobFailed(
                f"{self.option}: must show text to a policy that is trained, got images, which "
                "only `warmd eval` takes"
            )
        return ids, []

    def _begin(self, key: Key) -> None:
        if (known := self._known.get(key)) is not None:
            if self._rules.repeats(known):
                self.failed.append(known)
                self._begin(key._replace(attempt=key.attempt + 1))
            else:
                self._ended[key.task, key.member] = known
            return
        self._playing[key] = episode = Episode(key, asked_at=time.monotonic())
        self._start(episode)

    def _answer(self, answer: Answer) -> None:
        key: Key = answer.episode  # type: ignore[assignment]
        episode = self._playing[key]
        episode.environment_s += time.monotonic() - episode.asked_at
        if answer.failure is not None:
            self._fail(episode, answer.failure)
        else:
            self._answered(episode, answer)

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
        episode.failure, episode.reason, episode.reward = failure, failure.reason, None
        if not self._rules.repeats(episode):
            self._leave(episode)
            return
        self._forget(episode)
        self.failed.append(episode)
        self._begin(key._replace(attempt=key.attempt + 1))

    def _leave_out(self, episode: Episode, failure: Failure, reason: str) -> None:
        episode.failure, episode.reason, episode.reward = failure, reason, None
        self._leave(episode)

    def _leave(self, episode: Episode) -> None:
        self._forget(episode)
        self._ended[episode.key.task, episode.key.member] = episode

    def _forget(self, episode: Episode) -> None:
        """Take an attempt that has ended or failed from those that are played."""
        del self._playing[episode.key]
        self._drop(episode.key)
        if self._on_end is not None:
            self._on_end(episode)
