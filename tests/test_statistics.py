"""The statistics of evaluations, against published values and enumeration."""

import math
from dataclasses import asdict
from itertools import combinations

import numpy as np
import orjson
import pytest

from warmd.jobs.statistics import (
    BETTER,
    MCNEMAR,
    STUDENT,
    UNDECIDED,
    WORSE,
    compare,
    interval_of,
    interval_words,
    majority,
    mcnemar,
    mean_interval,
    pass_at_k,
    questions_needed,
    t_probability,
    wilson,
)


def test_the_wilson_interval_is_that_of_the_literature():
    assert wilson(0.1, 10) == pytest.approx((0.0179, 0.4042), abs=1e-4)  # Newcombe 1998
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


def test_the_mcnemar_test_is_exact_and_two_sided():
    assert mcnemar(0, 0) == 1
    assert mcnemar(5, 5) == 1
    assert mcnemar(6, 0) == pytest.approx(2 / 64)
    assert mcnemar(0, 6) == mcnemar(6, 0)
    assert mcnemar(2, 8) == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert 0 <= mcnemar(1500, 1000) < 1e-20


def test_an_end_of_an_interval_that_is_0_is_exactly_0():
    assert wilson(0.0, 7)[0] == 0
    assert wilson(1.0, 7)[1] == 1
    values = [0.1, 0.2, 0.3, 0.7]
    low, _ = mean_interval([value + 0.0866025403784 for value in values]) or (1, 1)
    assert low != 0
    centered = [value - low for value in values]
    assert mean_interval([c + 0.0866025403784 for c in centered])[0] == 0  # type: ignore[index]
    assert interval_words(2.776e-17, 0.1) == "0 to 0.1"  # as earlier versions stored it
    assert interval_words(-0.25, 0.125, "+.4g") == "-0.25 to +0.125"
    assert interval_words(None, None) == "unknown"


def test_the_t_distribution_is_that_of_the_tables():
    for degrees, quantile in ((1, 12.70620), (2, 4.30265), (9, 2.26216), (39, 2.02269)):
        assert t_probability(quantile, degrees) == pytest.approx(0.05, abs=1e-6)
    assert t_probability(0, 5) == 1
    angle = math.atan(12 / math.sqrt(3))  # closed form of 3 degrees of freedom
    by_angle = 1 - 2 / math.pi * (angle + math.sin(angle) * math.cos(angle))
    assert t_probability(12.0, 3) == pytest.approx(by_angle, rel=1e-9)
    assert 0 < t_probability(50, 100) < 1e-70


def test_the_interval_of_a_mean_is_that_of_student():
    # Student (1908), "The probable error of a mean": the gain of sleep by two drugs.
    gains = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    assert mean_interval(gains) == pytest.approx((0.7001, 2.4599), abs=1e-4)
    found = compare([0.0] * 10, gains)
    assert found.p == pytest.approx(0.00283, abs=1e-5)
    assert found.verdict == BETTER
    assert (found.low, found.high) == pytest.approx((0.7001, 2.4599), abs=1e-4)


def test_the_interval_of_values_that_are_equal_has_no_width_and_of_one_value_there_is_none():
    assert interval_of([0.5] * 20) == (0.5, 0.5)
    assert interval_of([0.5]) is mean_interval([0.5]) is mean_interval([]) is None
    assert interval_of([1.0]) == wilson(1.0, 1)


def test_the_interval_of_a_ratio_is_as_wide_as_the_ratio_varies_not_as_the_lengths_do():
    generator = np.random.default_rng(4)
    sizes = generator.integers(20, 2600, 200)
    bits = [2.0 + noise for noise in generator.normal(0, 0.05, 200)]  # per byte
    low, high = mean_interval(bits, sizes.tolist()) or (0, 0)
    totals = np.array(bits) * sizes
    picked = generator.integers(0, 200, (4000, 200))  # texts with their lengths
    ratios = totals[picked].sum(1) / sizes[picked].sum(1)
    assert high - low == pytest.approx(np.diff(np.percentile(ratios, [2.5, 97.5]))[0], rel=0.1)
    assert low < totals.sum() / sizes.sum() < high
    assert mean_interval([2.0, 2.0], [20, 2600]) == (2.0, 2.0)


def coverage(n, draw, simulations):
    """The share of intervals that contain the true ratio 0."""
    found = 0
    for _ in range(simulations):
        sizes, values = draw(n)
        low, high = mean_interval(values.tolist(), sizes.tolist()) or (0, 0)
        found += low <= 0 <= high
    return found / simulations


WIDE = pytest.mark.nightly(
    part="oracles",
    catches="a verdict or an interval that is wrong too often at some number of questions",
)


@pytest.mark.parametrize("n", [6, *(pytest.param(n, marks=WIDE) for n in (4, 8, 12, 20, 40))])
def test_intervals_of_few_texts_of_very_different_lengths_contain_the_truth(n):
    generator = np.random.default_rng(n)

    def draw(n):
        sizes = np.exp(generator.normal(5, 1, n))
        return sizes, generator.normal(0, 1, n) / np.sqrt(sizes)

    assert coverage(n, draw, 1500) > 0.93


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    for n, correct, k in ((5, 2, 1), (5, 2, 3), (6, 0, 2), (4, 4, 4), (8, 3, 6)):
        subsets = list(combinations(range(n), k))
        share = sum(min(subset) < correct for subset in subsets) / len(subsets)
        assert pass_at_k(n, correct, k) == pytest.approx(share)
    with pytest.raises(ValueError, match="from 1 to 4, got 5"):
        pass_at_k(4, 1, 5)


def test_the_majority_is_of_the_first_k_and_the_first_of_equals():
    assert majority(["8", "7", "7", "8"], 4) == "8"
    assert majority(["1", "2", "2", "3", "3", "3"], 3) == "2"


def pairs(both, gained, lost, neither):
    first = [1.0] * both + [0.0] * gained + [1.0] * lost + [0.0] * neither
    second = [1.0] * both + [1.0] * gained + [0.0] * lost + [0.0] * neither
    return first, second


def test_a_significant_gain_is_better_and_the_same_loss_worse():
    first, second = pairs(50, 30, 5, 115)
    found = compare(first, second)
    assert (found.verdict, found.gained, found.lost, found.n) == (BETTER, 30, 5, 200)
    assert found.difference == pytest.approx(0.125)
    assert found.low is not None
    assert found.high is not None
    assert 0 < found.low < 0.125 < found.high
    assert (found.p, found.test) == (mcnemar(30, 5), MCNEMAR)
    assert found.more_questions is None
    assert compare(second, first).verdict == WORSE


def test_an_insignificant_difference_is_undecided_and_says_how_many_questions_would_decide():
    first, second = pairs(80, 12, 8, 100)
    found = compare(first, second)
    assert found.verdict == UNDECIDED
    # s^2 = 0.1 - 0.02^2; (1.96 + 0.84)^2 * s^2 / 0.02^2 = 1954, 200 of them asked.
    assert found.more_questions == 1800
    assert found.words == "undecided: about 1800 more questions would be needed"
    same = compare(first, first)
    assert same.words == "undecided: no difference on 200 questions"


def test_other_values_are_decided_by_the_paired_t_test():
    generator = np.random.default_rng(2)
    first, noises = generator.normal(0, 1, 100).tolist(), generator.normal(0, 0.3, 100)
    second = [value + 0.2 + noise for value, noise in zip(first, noises, strict=True)]
    found = compare(first, second)
    assert (found.verdict, found.test) == (BETTER, STUDENT)
    assert found.p is not None
    assert found.p < 1e-6
    assert compare(first, second, lower_is_better=True).verdict == WORSE
    assert compare(first, [value + 0.1 for value in first[:3]] + first[3:]).verdict == UNDECIDED


@pytest.mark.parametrize("factor", [1.0, 1e-300, 1e300])
def test_a_comparison_that_is_equal_up_to_rounding_is_no_difference(factor):
    for first, second in (
        ([0.1, 0.2, 0.3, 0.4], [0.3, 0.4, 0.1, 0.2]),  # equal in sum, but not in binary
        ([0.7, 0.1, 0.2], [0.1, 0.2, 0.7]),
        ([0.3] * 9, [0.1 + 0.2] * 9),
    ):
        found = compare([factor * a for a in first], [factor * b for b in second])
        assert (found.difference, found.p, found.more_questions) == (0, 1, None)
        assert found.words == f"undecided: no difference on {len(first)} questions"
        orjson.dumps(asdict(found))
    assert (found.gained, found.lost, found.low, found.high) == (0, 0, 0, 0)


def test_a_tiny_difference_asks_for_a_bounded_number_of_questions():
    found = compare([0.5, 0.25] * 10, [0.25, 0.5 + 1e-12] * 10)
    assert found.more_questions == 10**9
    assert found.words.startswith("undecided: more than 1000000000 more")
    assert questions_needed([0.2, -0.2 + 1e-17]) is None
    assert questions_needed([1e-300, 3e-300]) == 4
    assert questions_needed([0.5]) == 7


def test_a_few_equal_differences_decide_only_as_far_as_they_are_improbable():
    assert compare([0.1] * 3, [0.2] * 3).verdict == UNDECIDED
    found = compare([0.1] * 4, [0.2] * 4)
    assert (found.verdict, found.p) == (BETTER, 4.0**-3)
    one = compare([0.1], [0.2])
    assert (one.verdict, one.p, one.low, one.high) == (UNDECIDED, None, None, None)


def test_no_question_that_differs_leaves_an_interval_with_a_width():
    found = compare([1.0, 0.0] * 5, [1.0, 0.0] * 5)
    assert found.low == -found.high == pytest.approx(-0.1633, abs=1e-4)  # type: ignore[operator]


def equals(generator, kind, n, shift=0.0):
    """Rewards of two models that are equally good, but for a shift."""
    if kind == "normal":
        return generator.normal(0, 1, n), generator.normal(shift, 1, n)
    if kind == "0 and 0.1":
        first, second = generator.random(n) < 0.5, generator.random(n) < 0.5 + shift / 4
        return first * 0.1, second * 0.1
    first, second = generator.normal(0.5, 0.25, n), generator.normal(0.5 + shift / 4, 0.25, n)
    return np.round(first.clip(0, 1), 1), np.round(second.clip(0, 1), 1)


KINDS = ("normal", "0 and 0.1", "grid of 0.1")
MANY = [(n, kind) for n in (4, 6, 8, 12, 20, 40) for kind in KINDS]


@pytest.mark.parametrize(
    ("n", "kind", "simulations"),
    [
        (6, "normal", 1000),
        *(pytest.param(n, kind, 4000, marks=WIDE) for n, kind in MANY),
    ],
)
def test_about_one_in_twenty_comparisons_of_equals_is_decided(n, kind, simulations):
    generator = np.random.default_rng([n, KINDS.index(kind)])
    decided = 0
    for _ in range(simulations):
        first, second = equals(generator, kind, n)
        decided += compare(first.tolist(), second.tolist()).verdict != UNDECIDED
    assert decided / simulations <= 0.057


@WIDE
@pytest.mark.parametrize(("n", "kind"), [one for one in MANY if one[1] != "0 and 0.1"])
def test_the_power_of_a_comparison_is_that_of_a_paired_t_test(n, kind):
    generator = np.random.default_rng(n)
    decided, by_t = 0, 0
    for _ in range(4000):
        first, second = equals(generator, kind, n, shift=3.5 / np.sqrt(n))
        decided += compare(first.tolist(), second.tolist()).verdict != UNDECIDED
        differences = second - first
        error = differences.std(ddof=1) / np.sqrt(n)
        by_t += error < 1e-12 or t_probability(abs(differences.mean()) / error, n - 1) < 0.05
    assert 0.2 < by_t / 4000 < 0.9
    assert decided / 4000 > by_t / 4000 - 0.02


def test_about_as_many_questions_decide_in_four_of_five_samples():
    generator = np.random.default_rng(3)
    truth = [0.3, -0.3] * 35 + [0.3] * 10  # mean 0.0375
    needed = len(truth) + (questions_needed(truth) or 0)
    decided = 0
    for _ in range(400):
        sample = generator.choice(truth, needed)
        decided += abs(sample.mean()) > 1.96 * sample.std(ddof=1) / np.sqrt(needed)
    assert 0.72 < decided / 400 < 0.9
