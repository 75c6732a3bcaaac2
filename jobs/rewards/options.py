"""The options of all kinds that score completions. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import SpecError
from ..graders import grader as graders
from ..spec import Spec, option
from . import problems, rewards
from .user_rewards import NOT_PASSED, TRL_KEYWORDS, KeywordReward

MOST_WORDS = 2**20  # of a completion


@dataclass(frozen=True, kw_only=True)
class RewardsSpec(Spec):
    """How completions are scored."""

    reward: tuple[str, ...] = option(
        ("correctness",),
        f"reward function: {', '.join(rewards.NAMES)} or module:function, optionally =WEIGHT; "
        "several are summed; with environment module:function, added to what the environment gives",
        group="reward",
    )
    grader: str | None = option(
        None,
        "OpenAI grader as JSON (string_check, text_similarity, multi, python with module:function "
        "as its source) that computes the reward grader",
        group="reward",
    )
    reward_timeout: float | None = option(
        None,
        "time limit in seconds for the rewards of a group, which are then computed in a separate "
        "process; a group whose rewards fail is left out",
        group="reward",
        default_text="no limit; a reward that fails ends the job",
        above=0,
        maximum=10**6,
    )
    custom_min_length: int | None = option(
        None,
        "minimum number of words (reward custom)",
        group="reward",
        minimum=0,
        maximum=MOST_WORDS,
    )
    custom_max_length: int | None = option(
        None,
        "maximum number of words (reward custom)",
        group="reward",
        minimum=0,
        maximum=MOST_WORDS,
    )
    custom_required_term: tuple[str, ...] = option(
        (), "term that must occur (reward custom)", group="reward"
    )
    custom_forbidden_term: tuple[str, ...] = option(
        (), "term that must not occur (reward custom)", group="reward"
    )
    custom_format_pattern: str | None = option(
        None, "regular expression that earns custom_format_bonus (reward custom)", group="reward"
    )
    custom_format_bonus: float = option(
        0.5,
        "reward for matching custom_format_pattern (reward custom)",
        group="reward",
        above=0,
        maximum=1000,
    )

    def check(self) -> None:
        super().check()
        names = [spec.name for spec in self.reward_specs]
        if not names or len(set(names)) < len(names):
            got = ", ".join(names) or "none"
            raise SpecError("reward", f"must be one or more, each once, got {got}")
        if (rewards.GRADER in names) != (self.grader is not None):
            raise SpecError("grader", "must go with the reward grader, got one without the other")
        if self.grader is not None:
            graders.read(self.grader)

    @property
    def reward_specs(self) -> list[rewards.RewardSpec]:
        """The rewards with their weights. Raises SpecError."""
        return [rewards.parse(text) for text in self.reward]

    def reward_functions(
        self, found: Sequence[problems.Problem]
    ) -> dict[str, rewards.Reward | KeywordReward]:
        """The reward functions by name; imports the user's. Raises SpecError."""
        custom = rewards.CustomOptions(
            min_length=self.custom_min_length,
            max_length=self.custom_max_length,
            required_terms=self.custom_required_term,
            forbidden_terms=self.custom_forbidden_term,
            format_pattern=self.custom_format_pattern,
            format_bonus=self.custom_format_bonus,
        )
        columns = problems.columns_of(problem.columns for problem in found)
        columns = [name for name in columns if name != NOT_PASSED]
        return {
            spec.name: rewards.resolve(spec, custom, columns=columns, grader=self.grader)
            for spec in self.reward_specs
        }

    def check_columns(self, found: Sequence[problems.Problem], *further: str) -> None:
        """Check that no column has the name of another argument of rewards. Raises SpecError.

        `further`: names of arguments that only these rewards have.
        """
        if not (self.has_own_rewards or self.grader):
            return
        for name in problems.columns_of(problem.columns for problem in found):
            if name in (*TRL_KEYWORDS, *further):
                raise SpecError(
                    "dataset",
                    f"must have no column {name}, which rewards receive as another argument: "
                    f"--columns NEW_NAME={name} renames it",
                )

    @property
    def has_own_rewards(self) -> bool:
        """Whether a reward is a user function, or a grader calls one."""
        functions = graders.read(self.grader).functions if self.grader else ()
        return bool(functions) or any(spec.is_own for spec in self.reward_specs)

    def check_answer(self, problem: problems.Problem) -> None:
        """Check that a problem has the answer that its rewards need. Raises SpecError."""
        if any(spec.name == "correctness" for spec in self.reward_specs):
            rewards.check_answer(problem)
