"""Statistics of evaluations: intervals of shares and means, paired comparisons, pass@k and maj@k.

Standard library only. All intervals are 95 %, and an end that is 0 up to rounding is 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

_Z = 1.959964  # two-sided 95 % of a normal distribution
_Z_POWER = 0.841621  # one-sided 80 %: the power that `questions_needed` aims at
LEVEL = 0.05
# The level of the t test where differences have several sizes. On rewards of some ten levels it
# decides slightly more often than its level: at 4.8 % at most 5.2 % of equals, for at most 1.3
# points of power. Where all differences have one size (rewards of two values), the lower level
# would cost 3 to 4 points of power, and the level of 5 % decides at most 5.6 % of equals.
_LEVEL_OF_SIZES = 0.048
# The minimum that `questions_needed` counts with: for fewer questions Student's quantile is far
# above the normal distribution's, by which it estimates.
_LEAST_QUESTIONS = 6
_MOST_QUESTIONS = 10**9  # maximum that `questions_needed` returns
# A difference smaller than this, relative to its operands, is a rounding error.
_ROUNDING = 2.0**-48

Interval = tuple[float, float]
Answer = TypeVar("Answer", bound=Hashable)

BETTER, WORSE, UNDECIDED = "better", "worse", "undecided"
STUDENT = "t"  # the test; results of earlier versions may have "mcnemar", or no test


def wilson(share: float, n: int) -> Interval:
    """Return the 95 % Wilson score interval of a share of n. It is no interval of other means."""
    z2 = _Z * _Z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # At these shares an end is the share itself; rounding would miss it.
    return 0.0 if share == 0 else middle - half, 1.0 if share == 1 else middle + half


def mean_interval(
    values: Sequence[float], weights: Sequence[float] | None = None
) -> Interval | None:
    """Return the 95 % interval of a mean by Student's t; None for fewer than two values.

    With weights: of the ratio sum(weight * value) / sum(weight), as of bits to bytes.
    """
    if len(values) < 2:
        return None
    return estimate(values, weights).interval(max(map(abs, values)))


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error, and the degrees of freedom of that."""

    mean: float
    error: float
    degrees: float

    def interval(self, size: float) -> Interval:
        """Return the 95 % interval. An end that is the rounding of values of a size is 0."""
        half = self.error * _t_quantile(self.degrees)
        return _rounded(self.mean - half, size), _rounded(self.mean + half, size)


def estimate(values: Sequence[float], weights: Sequence[float] | None = None) -> Estimate:
    """Estimate a mean; with weights the ratio sum(weight * value) / sum(weight).

    The error is that of the delete-one jackknife (Efron & Stein 1981), which leaves out each value
    together with its weight; with equal weights it is s / sqrt(n). A few large weights tell as
    little as few values: the degrees of freedom are those of Kish's effective number of values,
    (sum w)^2 / sum w^2.
    """
    n = len(values)
    weights = [1.0] * n if weights is None else weights
    # In units of a power of two near the largest value no sum or square overflows.
    unit = math.ldexp(1.0, max(math.frexp(max(map(abs, values)))[1] - 1, -1000))
    scaled, total = [value / unit for value in values], math.fsum(weights)
    mean = math.fsum(w * v for w, v in zip(weights, scaled, strict=True)) / total
    error = 0.0
    if max(scaled) - min(scaled) > _ROUNDING:
        left_out = (w * (v - mean) / (total - w) for w, v in zip(weights, scaled, strict=True))
        error = math.sqrt((n - 1) / n * math.fsum(one * one for one in left_out))
    effective = total * total / math.fsum(w * w for w in weights)
    return Estimate(mean * unit, error * unit, max(effective - 1, 1.0))


def _rounded(value: float, size: float) -> float:
    """Return a value that was computed from numbers of a size; 0 if it is only their rounding."""
    return 0.0 if abs(value) <= _ROUNDING * size else value


@lru_cache(maxsize=1024)
def _t_quantile(degrees: float) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution, by bisection."""
    low, high = 1.9, 13.0  # of 1 to infinitely many degrees of freedom
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, degrees) > LEVEL else (low, middle)
    return high


def t_probability(t: float, degrees: float) -> float:
    """Return how probable |T| >= t is for Student's T: I_x(degrees / 2, 1 / 2), x = d / (d + t^2).

    The incomplete beta function is computed as a continued fraction by Lentz' method (Press et al.,
    Numerical Recipes, 3rd edition, 6.4), to a relative error below 1e-12 for degrees from 1 to 1e7.
    """
    square = t * t
    if degrees > 10_000:
        return _t_probability_of_many(square, degrees)
    a, b = degrees / 2, 0.5
    x, rest = degrees / (degrees + square), square / (degrees + square)  # their sum is 1
    # x^a (1 - x)^b / B(a, b). 1 - x and log(x) keep their digits where x is nearly 1.
    front = math.exp(-a * math.log1p(square / degrees)) * math.sqrt(rest / math.pi)
    front *= _gamma_ratio(a)
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1 - front * _beta_fraction(b, a, rest) / b


def _t_probability_of_many(square: float, degrees: float) -> float:
    """Return `t_probability` for many degrees, where the fraction's factors cancel each other.

    By an expansion of the equivalent normal deviate (Hill 1970, Communications of the ACM 13,
    algorithm 395), whose relative error is of the order of degrees^-6.
    """
    a = degrees - 0.5
    b, y2 = 48 * a * a, a * math.log1p(square / degrees)
    second = (((-0.4 * y2 - 3.3) * y2 - 24) * y2 - 85.5) / (0.8 * y2 * y2 + 100 + b)
    return math.erfc(math.sqrt(y2 / 2) * (1 + (y2 + 3 + second) / b))


def _gamma_ratio(a: float) -> float:
    """Return gamma(a + 1/2) / gamma(a).

    A difference of two `lgamma` loses as many digits as these have before the point.
    """
    if a < 100:
        return math.gamma(a + 0.5) / math.gamma(a)
    # The asymptotic series (Tricomi & Erdelyi 1951, Pacific Journal of Mathematics 1).
    u = 1 / (8 * a)
    return math.sqrt(a) * (1 - u + u * u / 2 + u**3 * 2.5 - u**4 * 2.625 - u**5 * 49.875)


def _beta_fraction(a: float, b: float, x: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    found = d
    for m in range(1, 10_000):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + factor * d or tiny)
            c = 1 + factor / c or tiny
            found *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return found


def interval_words(low: float | None, high: float | None, form: str = ".4g") -> str:
    """Return an interval in words: '0.1 to 0.25'. An end that is 0 up to rounding is shown as 0."""
    if low is None or high is None:
        return "unknown"
    ends = (_rounded(end, max(abs(low), abs(high))) for end in (low, high))
    return " to ".join(format(end, form) for end in ends)


def interval_of(values: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of a mean: Wilson's of 0s and 1s, else Student's.

    None for a single value that is neither.
    """
    if {*values} <= {0, 1}:
        return wilson(math.fsum(values) / len(values), len(values))
    return mean_interval(values)


@dataclass(frozen=True)
class Comparison:
    """The paired comparison of a second model with a first one on the same questions."""

    n: int
    difference: float  # mean of second - first
    # 95 % interval of the difference; None: unknown (a single question, or equal differences on too
    # few questions to decide, in both cases of values other than 0 and 1).
    low: float | None
    high: float | None
    gained: int  # pairs where the second is better
    lost: int
    test: str  # STUDENT
    p: float | None  # of the test; None: a single question
    verdict: str  # BETTER, WORSE or UNDECIDED, of the second model
    more_questions: int | None  # of an undecided one; None: decided, or no difference was seen
    unscored: int = 0  # further questions, left out: one of the models has no score there

    @property
    def words(self) -> str:
        """The verdict as a clause: 'undecided: about 700 more questions would be needed'."""
        return self._verdict_words + unscored_words(self.unscored, self.n)

    @property
    def _verdict_words(self) -> str:
        if self.verdict != UNDECIDED:
            return self.verdict
        if self.more_questions is None:
            return f"{UNDECIDED}: no difference on {self.n} questions"
        about = "about" if self.more_questions < _MOST_QUESTIONS else "more than"
        return f"{UNDECIDED}: {about} {self.more_questions} more questions would be needed"


def unscored_words(unscored: int, n: int) -> str:
    """Return the clause of a comparison that counts what it left out; "" for nothing."""
    return f"; unscored by one of both: {unscored} of {unscored + n} questions" if unscored else ""


def compare(
    first: Sequence[float],
    second: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    lower_is_better: bool = False,
) -> Comparison:
    """Compare two models by their values on the same questions.

    The test is Student's paired t test: at 5 % where all questions that differ do so by the same
    amount, as for 0 and 1, else at 4.8 %. Of equal models, whose scores on a question are
    independent draws from one distribution, it decides at most 5.6 % for rewards of two values
    (8 questions), 6.4 % for three equally spaced values (7 questions), 5.7 % for four equally
    frequent ones (6), and 5.2 % for ten. Models that are equal on average, but good at different
    questions, are decided more often: up to 12.5 % for two values (4 and 7 questions). The exact
    McNemar test stays below 5 % for two values, but its power is up to 52 points lower with
    8 questions, and 38 points with 40.

    The interval is Student's too; where all differences of 0s and 1s are equal, which leaves
    Student's no width, it is Agresti & Min's. It excludes 0 exactly where the test decides: it is
    extended to 0 where p is between 4.8 and 5 %, and for three equal differences of 0s and 1s; for
    equal differences of other values it is unknown until the test decides.

    `weights`: of the questions, where the metric is a ratio (`estimate`). Raises ValueError without
    pairs, or where the lengths differ, and OverflowError for a difference beyond the largest float.
    """
    pairs = list(zip(first, second, strict=True))
    if not pairs:
        raise ValueError("no pairs to compare")
    sizes = [max(abs(a), abs(b)) for a, b in pairs]
    differences = [_rounded(b - a, size) for (a, b), size in zip(pairs, sizes, strict=True)]
    if not all(map(math.isfinite, differences)):
        raise OverflowError("values differ by more than the largest float")
    above, below = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    gained, lost = (below, above) if lower_is_better else (above, below)
    found, n = estimate(differences, weights), len(pairs)
    mean = _rounded(found.mean, estimate(sizes, weights).mean)
    interval, p = None, None  # of a single question: unknown
    if n > 1:
        interval, p = found.interval(max(sizes)), _t_test(found, n) if mean else 1.0
    is_binary = {*first, *second} <= {0, 1}
    if not found.error and is_binary:
        interval = _agresti_min(above, below, n)
    has_one_size = len({abs(d) for d in differences if d}) == 1
    is_decided = p is not None and p < (LEVEL if has_one_size else _LEVEL_OF_SIZES)
    is_better = mean < 0 if lower_is_better else mean > 0
    verdict = (BETTER if is_better else WORSE) if is_decided else UNDECIDED
    if interval is not None and not is_decided:
        is_known = found.error or is_binary or not mean
        interval = (min(interval[0], 0.0), max(interval[1], 0.0)) if is_known else None
    more = questions_needed(differences, weights) if mean and not is_decided else None
    low, high = interval or (None, None)
    return Comparison(n, mean, low, high, gained, lost, STUDENT, p, verdict, more)


def _t_test(found: Estimate, n: int) -> float:
    """Return the p-value of the mean of n differences.

    Differences that are all equal have no spread, and Student's p would be 0. Two independent
    scores of one distribution differ by a given amount with a probability of at most 1/4; so n
    differences are all equal, and not 0, with one of at most 4^(1 - n).
    """
    if not found.error:
        return 4.0 ** (1 - n)
    return t_probability(abs(found.mean) / found.error, found.degrees)


def _agresti_min(above: int, below: int, n: int) -> Interval:
    """Return the 95 % interval of a difference of paired shares.

    Wald's after adding 1/2 to each of the four cells (Agresti & Min 2005, Statistics in Medicine
    24): otherwise it has no width where no question differs.
    """
    difference, differing = (above - below) / (n + 2), (above + below + 1) / (n + 2)
    half = _Z * math.sqrt((differing - difference**2) / (n + 2))
    return max(difference - half, -1.0), min(difference + half, 1.0)


def questions_needed(
    differences: Sequence[float], weights: Sequence[float] | None = None
) -> int | None:
    """Return about how many more questions would decide.

    If the mean difference seen is the true one: for a two-sided test at 5 % with a power of 80 %,
    n = ((z + z_power) s / mean)^2, where s is the standard deviation of the differences. Rounded up
    to two digits, and at most 10^9; None if the mean is 0 up to rounding.
    """
    n, found = len(differences), estimate(differences, weights)
    if not _rounded(found.mean, max(map(abs, differences))):
        return None
    relative = found.error / abs(found.mean) if n > 1 else 1.0  # of one question: unknown
    needed = max((_Z + _Z_POWER) ** 2 * n * relative * relative, _LEAST_QUESTIONS)
    more = max(math.ceil(min(needed, _MOST_QUESTIONS)) - n, 1)
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
