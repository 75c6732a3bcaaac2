"""Statistics of evaluations: intervals of shares and means, paired comparisons, pass@k and maj@k.

Imports no torch, and numpy only where values are resampled. All intervals are 95 %.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_Z = 1.959964  # two-sided 95 % of a normal distribution
_Z_POWER = 0.841621  # one-sided 80 %: the power that `questions_needed` aims at
_LEVEL = 0.05
_RESAMPLES = 10_000
_CHUNK = 2**22  # numbers drawn at once by the bootstrap: 32 MB
# Fewer differing pairs cannot be significant in a two-sided sign test: 2 * 0.5**5 > 0.05.
_LEAST_DIFFERENT = 6

Answer = TypeVar("Answer", bound=Hashable)

BETTER, WORSE, UNDECIDED = "better", "worse", "undecided"


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a share of n.

    For the mean of values between 0 and 1 it is conservative.
    """
    z2 = _Z * _Z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean by Student's t, for example over a few seeds.

    None for fewer than two values. Unlike `bootstrap` it is wide enough for three values.
    """
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = _t_quantile(n - 1) * spread / math.sqrt(n)
    return mean - half, mean + half


# Two-sided 95 % of Student's t distribution, for 1, 2, … degrees of freedom.
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


def _t_quantile(degrees: int) -> float:
    """Return the quantile; beyond the table by its expansion (Abramowitz & Stegun, 26.7.5)."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    z, cubed = _Z, _Z * _Z * _Z
    second = 5 * cubed * z * z + 16 * cubed + 3 * z
    return z + (cubed + z) / (4 * degrees) + second / (96 * degrees * degrees)


def mcnemar(gained: int, lost: int) -> float:
    """Return the p-value of the exact two-sided McNemar test.

    gained: pairs that only the second of two models answers correctly; lost: only the first.
    """
    n, fewer = gained + lost, min(gained, lost)
    tail = sum(math.comb(n, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / (1 << n))


def bootstrap(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean (Efron 1979).

    The same seed gives the same result. Of paired differences it is the paired bootstrap. Raises
    ValueError without values.
    """
    import numpy as np

    found = np.asarray(values, dtype=np.float64)
    if not len(found):
        raise ValueError("no values to resample")
    generator = np.random.default_rng(seed)
    at_once = max(1, _CHUNK // len(found))
    means = [
        found[
            generator.integers(len(found), size=(min(at_once, _RESAMPLES - done), len(found)))
        ].mean(axis=1)
        for done in range(0, _RESAMPLES, at_once)
    ]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class Comparison:
    """The paired comparison of a second model with a first one on the same questions."""

    n: int
    difference: float  # mean of second - first
    low: float  # 95 % interval of the difference, by the paired bootstrap
    high: float
    gained: int  # pairs where the second is better
    lost: int
    p: float | None  # exact McNemar test; None: the values are not only 0 and 1
    verdict: str  # BETTER, WORSE or UNDECIDED, of the second model
    more_questions: int | None  # of an undecided one; None: decided, or no difference was seen

    @property
    def words(self) -> str:
        """The verdict as a clause: 'undecided: about 700 more questions would be needed'."""
        if self.verdict != UNDECIDED:
            return self.verdict
        if self.more_questions is None:
            return f"{UNDECIDED}: no difference on {self.n} questions"
        return f"{UNDECIDED}: about {self.more_questions} more questions would be needed"


def compare(
    first: Sequence[float],
    second: Sequence[float],
    *,
    lower_is_better: bool = False,
    seed: int = 0,
) -> Comparison:
    """Compare two models by their values on the same questions.

    Decided at the 5 % level: by the exact McNemar test where all values are 0 or 1, else by whether
    the interval of the paired bootstrap contains 0. Raises ValueError without pairs, or where the
    lengths differ.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    low, high = bootstrap(differences, seed=seed)
    above, below = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    gained, lost = (below, above) if lower_is_better else (above, below)
    mean = math.fsum(differences) / len(differences)
    p = None
    if {*first, *second} <= {0, 1}:
        p = mcnemar(gained, lost)
        is_decided = p < _LEVEL
    else:
        is_decided = (low > 0 or high < 0) and above + below >= _LEAST_DIFFERENT
    is_better = mean < 0 if lower_is_better else mean > 0
    verdict = (BETTER if is_better else WORSE) if is_decided else UNDECIDED
    more = None if is_decided else questions_needed(differences)
    return Comparison(len(differences), mean, low, high, gained, lost, p, verdict, more)


def questions_needed(differences: Sequence[float]) -> int | None:
    """Return about how many more questions would decide.

    If the mean difference seen is the true one: for a two-sided test at 5 % with a power of 80 %,
    n = ((z + z_power) s / mean)^2, where s is the standard deviation of the differences. Rounded up
    to two digits; None if the mean is 0.
    """
    n = len(differences)
    mean = math.fsum(differences) / n
    if mean == 0:
        return None
    variance = math.fsum((d - mean) ** 2 for d in differences) / max(n - 1, 1)
    needed = max((_Z + _Z_POWER) ** 2 * variance / mean**2, _LEAST_DIFFERENT)
    more = max(math.ceil(needed) - n, 1)
    unit: int = 10 ** max(len(str(more)) - 2, 0)
    return math.ceil(more / unit) * unit


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from n samples, `correct` of them right.

    1 - C(n - c, k) / C(n, k): Chen et al. 2021, arXiv:2107.03374, equation 1. k is at most n.
    """
    if not 0 < k <= n:
        raise ValueError(f"k: must be from 1 to {n}, got {k}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(answers: Sequence[Answer], k: int) -> Answer:
    """Return the most frequent of the first k answers; ties go to the first one given.

    As maj@k of lm-evaluation-harness (`take_first_k`, `majority_vote`).
    """
    return Counter(answers[:k]).most_common(1)[0][0]
