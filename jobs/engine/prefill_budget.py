"""The number of prompt tokens of a scheduler step, by the measured speed of this machine.

Larger passes prefill faster, but decoding sequences wait meanwhile.
"""

from __future__ import annotations

_ALONE_S = 0.5  # per step, while no sequence of any model is decoding
_SHARED_S = 0.2  # least per step, while a sequence of any model is decoding
_BRIEF_S = 0.1  # per step, if so many tokens fit into it that a longer one is not faster
_EFFICIENT = 512  # tokens: a pass over more of them is not faster per token
# Most per step for prompts of jobs that have had more tokens than another one: the tokens of this
# other one would come several times as slowly.
AHEAD_S = 0.02


class PrefillBudget:
    """The prefill time of one engine's steps, and how many tokens fit into it."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0  # moving average; 0: nothing has been measured yet

    def seconds(self, num_prefilling: int, num_decoding: int, *, is_any_decoding: bool) -> float:
        """Return the time budget of a step, in seconds.

        It grows with the share of prompts among the sequences of the engine. `is_any_decoding`:
        whether a sequence of this or another engine waits for the step.
        """
        if not is_any_decoding:
            return _ALONE_S
        share = num_prefilling / (num_prefilling + max(1, num_decoding))
        return max(_SHARED_S, _ALONE_S * share)

    def tokens(self, seconds: float) -> int:
        """Return how many tokens fit into that time, at least one.

        A fast model takes less time: a step is not longer than efficient, as other jobs may come.
        """
        efficient = min(int(self.tokens_per_s * seconds), _EFFICIENT)
        return max(1, efficient, int(self.tokens_per_s * min(seconds, _BRIEF_S)))

    def measure(self, num_prefilled: int, num_decoded: int, seconds: float) -> None:
        """Update the speed with the duration of a pass over these numbers of tokens."""
        if num_prefilled:
            speed = (num_prefilled + num_decoded) / seconds
            self.tokens_per_s = (self.tokens_per_s + speed) / 2 if self.tokens_per_s else speed


class WholePrompts(PrefillBudget):
    """No limit: what shares a pass must not depend on the time that earlier ones took."""

    def tokens(self, seconds: float) -> int:
        return 2**62
