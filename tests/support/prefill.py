"""Prefill budgets for tests: of a fixed speed, and one that fails at a step."""

from __future__ import annotations

from warmd.jobs.engine.prefill_budget import PrefillBudget


class FixedSpeed(PrefillBudget):
    """The budget of a machine with a known speed, in tokens per second."""

    def __init__(self, tokens_per_s: float) -> None:
        super().__init__()
        self.tokens_per_s = tokens_per_s

    def measure(self, num_prefilled: int, num_decoded: int, seconds: float) -> None:
        """Keep the speed."""


class FailsAtStep(PrefillBudget):
    """A budget whose n-th measurement, after the n-th step, raises an error."""

    def __init__(self, step: int, error: BaseException) -> None:
        super().__init__()
        self.steps_left = step
        self.error = error

    def measure(self, num_prefilled: int, num_decoded: int, seconds: float) -> None:
        self.steps_left -= 1
        if not self.steps_left:
            raise self.error
