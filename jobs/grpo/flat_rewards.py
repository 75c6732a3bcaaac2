"""The warning that nothing is being learned: all completions of each group have the same reward."""

from __future__ import annotations

FLAT_STEPS = 20  # steps without unequal rewards in any group, after which it warns
_MOST_TRUNCATED = 0.5  # above it, the length is the likeliest cause


class FlatRewards:
    """Counts consecutive steps without unequal rewards in any group: all advantages are 0."""

    def __init__(self) -> None:
        self.steps = 0

    def count(self, *, is_flat: bool, reward: float, truncated: float) -> str | None:
        """Count a step with a mean reward; return the warning once, after many flat steps.

        `truncated`: share of completions that the maximum length has ended.
        """
        self.steps = self.steps + 1 if is_flat else 0
        if self.steps != FLAT_STEPS:
            return None
        cause = (
            f"{truncated:.0%} of the completions were truncated at max_completion_length, so an "
            "answer at their end is missing: try a larger one. Otherwise the task may be"
            if truncated > _MOST_TRUNCATED
            else "The task may be"
        )
        return (
            f"nothing is being learned: for {FLAT_STEPS} steps, all completions of each group had "
            f"the same reward (now {reward:.4g}), so every advantage is 0. {cause} too "
            "hard or too easy for this model, or the reward does not match its output: see "
            "`warmd samples`"
        )
