"""The options of kinds whose policy plays in an environment, or for an agent. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..errors import SpecError
from ..relations import GIVEN, Relation, goes_with, never_with
from ..rewards import rewards
from ..rewards.options import RewardsSpec
from ..rewards.problems import Problem, columns_of
from ..rewards.user_rewards import MOST_REWARD
from ..spec import option
from .interface import AGENT, ENVIRONMENT, ENVIRONMENTS

if TYPE_CHECKING:
    from .episodes import Rules
    from .pool import Limits, Pool

EPISODE_LENGTH = 1024  # default maximum, in tokens after the prompt
MOST_CONCURRENT = 16  # default
MOST_TURNS = 10_000
MOST_S = 10**7
MOST_STOP = 1000  # characters of a text that ends a turn
_GROUP = "environment"


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec(RewardsSpec):
    """An environment or an agent, the limits of its episodes, and functions that score them."""

    relations: ClassVar[tuple[Relation, ...]] = (
        goes_with(
            *("concurrency", "max_turns", "max_turn_length", "timeout_reward"),
            *("environment_attempts", "environment_timeout", "environment_reset_timeout"),
            "environment_memory",
            environment=GIVEN,
            agent=GIVEN,
        ),
        goes_with("environment_step_timeout", environment=GIVEN),
        never_with("agent", environment=GIVEN),
        never_with("reward", agent=GIVEN),  # it returns its own
        # With an environment functions are called in its processes, within the limit of step.
        never_with(
            *("grader", "reward_timeout", "custom_min_length", "custom_max_length"),
            *("custom_required_term", "custom_forbidden_term", "custom_format_pattern"),
            "custom_format_bonus",
            environment=GIVEN,
            agent=GIVEN,
        ),
    )

    environment: str | None = option(
        None,
        "environment that the policy plays in: module:Class with the methods reset and step of "
        "Gymnasium, or with tools and get_reward as TRL takes it, module:dict of such classes, "
        "demo:higher-lower, or ws://HOST:PORT of an OpenEnv server; it runs as your own code, not "
        "sandboxed",
        group=_GROUP,
        default_text="none: completions of prompts",
    )
    agent: str | None = option(
        None,
        "agent that lets the policy write turns: module:function, which gets a task, requests "
        "turns at OPENAI_BASE_URL with OPENAI_API_KEY, and returns a reward or a dict of them; it "
        "runs as your own code, not sandboxed",
        group=_GROUP,
        default_text="none: completions of prompts",
    )
    concurrency: int | None = option(
        None,
        "maximum number of episodes at the same time, each in a process",
        group=_GROUP,
        default_text=f"{MOST_CONCURRENT}, or the number of episodes if it is smaller",
        minimum=1,
        maximum=4096,
    )
    max_turns: int = option(
        16, "maximum number of turns of an episode", group=_GROUP, minimum=1, maximum=MOST_TURNS
    )
    max_turn_length: int | None = option(
        None,
        "maximum length of a turn in tokens; a longer one ends its episode",
        group=_GROUP,
        default_text="the limit of all turns and observations together",
        minimum=1,
        maximum=10**9,
    )
    stop: tuple[str, ...] = option(
        (),
        "text that ends a turn, besides the end tokens of the model, and is not part of the action",
        group=_GROUP,
        longest=MOST_STOP,
    )
    timeout_reward: float | None = option(
        None,
        "reward of an episode that exceeds a time limit",
        group=_GROUP,
        default_text="none: such an episode is left out",
        minimum=-MOST_REWARD,
        maximum=MOST_REWARD,
    )
    environment_attempts: int = option(
        2,
        "number of times that an episode may begin if its environment or agent fails",
        group=_GROUP,
        minimum=1,
        maximum=100,
    )
    environment_timeout: float = option(
        1800.0,
        "time limit of an episode in seconds (0: none)",
        group=_GROUP,
        minimum=0,
        maximum=MOST_S,
    )
    environment_reset_timeout: float = option(
        120.0,
        "time limit in seconds of the import of an environment or agent, and of reset (0: none)",
        group=_GROUP,
        minimum=0,
        maximum=MOST_S,
    )
    environment_step_timeout: float = option(
        60.0,
        "time limit of step in seconds (0: none)",
        group=_GROUP,
        minimum=0,
        maximum=MOST_S,
    )
    environment_memory: float | None = option(
        None,
        "memory limit in GB of the processes of an episode",
        group=_GROUP,
        default_text="none",
        above=0,
        maximum=10**6,
    )

    def check(self) -> None:
        super().check()
        if "" in self.stop:
            raise SpecError("stop", "must be text, each, got ''")
        for name in self.episode_rewards:
            if name in rewards.NAMES:
                raise SpecError("reward", f"must be module:function with environment, got {name}")

    @property
    def played(self) -> tuple[str, str] | None:
        """The option that names what plays, and its value; None: completions are sampled."""
        names = (ENVIRONMENT, AGENT)
        return next(((n, value) for n in names if (value := getattr(self, n)) is not None), None)

    @property
    def episode_rewards(self) -> dict[str, float]:
        """The weights of the functions that score episodes, by name; {}: the environment does."""
        if self.environment is None or self.reward == self.options()["reward"].default:
            return {}
        return {one.name: one.weight for one in self.reward_specs}

    def check_played(self, found: Sequence[Problem]) -> None:
        """Import the environment or agent, in a process of its own. Raises SpecError.

        `found`: the tasks, whose columns reward functions may take.
        """
        from .pool import described

        assert self.played is not None
        option, name = self.played
        if self.episode_rewards:
            self.check_columns(found, ENVIRONMENTS)
        described(
            name,
            [str(Path.cwd())],
            self.environment_reset_timeout,
            option=option,
            rewards=list(self.episode_rewards),
            columns=columns_of(one.columns for one in found),
        )

    @property
    def limits(self) -> Limits:
        """The limits of the processes of an environment."""
        from .pool import Limits

        return Limits(
            reset_s=self.environment_reset_timeout,
            step_s=self.environment_step_timeout,
            episode_s=self.environment_timeout,
            memory_bytes=int((self.environment_memory or 0) * 10**9),
        )

    def rules(self, max_tokens: int, positions: int | None) -> Rules:
        """Return the rules of an episode with `max_tokens` after its prompt.

        `positions`: of the model, None for no limit.
        """
        from .episodes import Rules

        return Rules(
            max_turns=self.max_turns,
            max_turn_tokens=min(self.max_turn_length or max_tokens, max_tokens),
            max_tokens=max_tokens,
            positions=positions,
            attempts=self.environment_attempts,
            timeout_reward=self.timeout_reward,
        )

    def pool(
        self, folders: Sequence[str], episodes: int, ranks: int = 1, columns: Sequence[str] = ()
    ) -> Pool:
        """Return the processes of the environment or agent, whose modules are in `folders`.

        `episodes`: that are played together. `ranks`: that divide them. `columns`: of the tasks.
        """
        from .pool import Pool

        assert self.played is not None
        option, name = self.played
        size = max(min(self.concurrency or MOST_CONCURRENT, episodes) // ranks, 1)
        return Pool(
            name,
            folders,
            size=size,
            limits=self.limits,
            option=option,
            rewards=list(self.episode_rewards),
            columns=columns,
        )
