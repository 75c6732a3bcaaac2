"""The statistics of evaluations, against published values and enumeration."""

import math
from dataclasses import asdict
from itertools import combinations

import numpy as np
import orjson
import pytest

from warmd.jobs.intervals import (
    BETTER,
    STUDENT,
    UNDECIDED,
    WORSE,
    compare,
    interval_of,
    interval_words,
    majority,
    mean_interval,
    pass_at_k,
    questions_needed,
    t_probability,
    wilson,
)


def test_the_wilson_interval_is_that_of_the_literature():
    assert wilson(0.1, 10) == pytest.approx((0.0179, 0.4042), abs=1e-4)  # Newcombe 1998
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


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


@pytest.mark.parametrize(
    ("t", "degrees", "expected"),
    [  # by series with 140 digits; SciPy 1.17.1 agrees to 1e-14
        (1e-09, 1, 0.9999999993633802),
        (6.3, 1, 0.10021469368201871),
        (0.5, 1.5, 0.68056711066994),
        (4.5, 2.5, 0.029894059008733993),
        (3.182446305284263, 3, 0.04999999999997876),
        (1.7, 5, 0.1498767868483239),
        (2.3646242510102993, 7, 0.05000000004284066),
        (5, 19, 7.949974998417634e-05),
        (13, 40, 6.028153349690658e-16),
        (1.74, 99.5, 0.08495096993934205),
        (1.7, 200, 0.0906854794914817),
        (1.97, 250, 0.049942125992355924),
        (8, 399, 1.364765294051429e-14),
        (2.1, 1000, 0.03597887431078196),
        (1.96, 7472, 0.05003290257547296),
        (1.8, 9999, 0.07189076889602354),
        (1.8, 10001, 0.07189076287043678),
        (4, 30000.0, 6.349428699665955e-05),
        (2.1, 1000000.0, 0.03572909097463502),
        (10, 10000000.0, 1.5243592290273756e-23),
    ],
)
def test_the_t_distribution_is_accurate_for_few_and_many_degrees_and_in_its_tails(
    t, degrees, expected
):
    assert t_probability(t, degrees) == pytest.approx(expected, rel=1e-12)


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
    error = math.sqrt((35 - 200 * 0.125**2) / 199 / 200)
    assert found.p == pytest.approx(t_probability(0.125 / error, 199), rel=1e-9)
    assert found.test == STUDENT
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


@pytest.mark.parametrize("n", range(1, 12))
@pytest.mark.parametrize("sign", [1, -1])
def test_an_interval_leaves_out_0_exactly_where_the_test_decides(n, sign):
    generator = np.random.default_rng(n)
    draws = [
        np.full(n, 0.2),
        np.full(n, 1.0),
        np.zeros(n),
        *(generator.normal(1, 1, n) for _ in range(400)),
        *(generator.integers(0, 4, n) / 3 for _ in range(100)),
        *(generator.integers(0, 2, n) * 1.0 for _ in range(50)),
    ]
    for differences in draws:
        first, second = [0.0] * n, (sign * differences).tolist()
        if sign < 0 and set(second) <= {0, -1}:
            first, second = [-value for value in second], first
        found = compare(first, second)
        if found.low is None or found.high is None:
            assert found.low is found.high is None
            assert found.verdict == UNDECIDED
        else:
            leaves_out_0 = found.low > 0 or found.high < 0
            assert leaves_out_0 == (found.verdict != UNDECIDED)


def test_a_few_equal_differences_have_no_interval_until_they_decide():
    for n in (2, 3):
        found = compare([0.1] * n, [0.3] * n)
        assert (found.verdict, found.low, found.high) == (UNDECIDED, None, None)
    found = compare([0.1] * 4, [0.3] * 4)
    assert found.verdict == BETTER
    assert found.low == pytest.approx(0.2)
    found = compare([0, 0, 0], [1, 1, 1])
    assert (found.verdict, found.low, found.high) == (UNDECIDED, 0.0, 1.0)
    found = compare([0.5] * 2, [0.5] * 2)
    assert (found.verdict, found.low, found.high) == (UNDECIDED, 0.0, 0.0)


def test_a_difference_beyond_the_largest_float_is_refused():
    with pytest.raises(OverflowError, match="differ by more than the largest float"):
        compare([1e308, 0.0], [-1e308, 0.0])
    assert compare([1e308, 0.0], [0.0, 0.0]).difference == -5e307


def equals(generator, kind, n, shift=0.0):
    """Rewards of two models that are equally good, but for a shift."""
    if kind == "normal":
        return generator.normal(0, 1, n), generator.normal(shift, 1, n)
    first, second = generator.normal(0.5, 0.25, n), generator.normal(0.5 + shift / 4, 0.25, n)
    return np.round(first.clip(0, 1), 1), np.round(second.clip(0, 1), 1)


def by_t(differences):
    """Whether a textbook paired t test decides at 5 %; without spread it does unless all is 0."""
    n, spread = len(differences), differences.std(ddof=1)
    if spread < 1e-12:
        return abs(differences[0]) > 1e-12
    return t_probability(abs(differences.mean()) / spread * math.sqrt(n), n - 1) < 0.05


KINDS = ("normal", "grid of 0.1")
COUNTS = (4, 6, 8, 12, 20, 40)
MANY = [(n, kind) for n in COUNTS for kind in KINDS]


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
@pytest.mark.parametrize("effect", [1, 2, 3.5, 5])
@pytest.mark.parametrize(("n", "kind"), MANY)
def test_the_power_of_a_comparison_is_that_of_a_paired_t_test(n, kind, effect):
    generator = np.random.default_rng([n, round(2 * effect)])
    decided, expected = 0, 0
    for _ in range(2000):
        first, second = equals(generator, kind, n, shift=effect / np.sqrt(n))
        decided += compare(first.tolist(), second.tolist()).verdict != UNDECIDED
        expected += by_t(second - first)
    assert abs(decided - expected) / 2000 < 0.02


@pytest.mark.parametrize("value", [0.1, 1.0])
@pytest.mark.parametrize("n", COUNTS)
def test_rewards_of_two_values_are_decided_as_by_a_paired_t_test(n, value):
    """All outcomes are enumerated, so that the share of equals that is decided is exact.

    If both models answer a question with one probability, a pair differs either way with a
    probability of at most 1/4; if they are good at different questions, of at most 1/2.
    """
    shares = np.linspace(0, 0.5, 101)[1:]
    level = np.zeros(len(shares))
    for gained in range(n + 1):
        for lost in range(n + 1 - gained):
            same = n - gained - lost
            first = [0.0] * gained + [value] * lost + [value] * same
            second = [value] * gained + [0.0] * lost + [value] * same
            found = compare(first, second)
            assert (found.verdict != UNDECIDED) == by_t(np.array(second) - np.array(first))
            if found.verdict != UNDECIDED:  # the interval agrees
                assert found.low is not None
                assert found.high is not None
                assert not found.low <= 0 <= found.high
                ways = math.comb(n, gained) * math.comb(n - gained, lost)
                level += ways * shares ** (gained + lost) * (1 - 2 * shares) ** same
    assert level[shares <= 0.25].max() < 0.057
    assert level.max() <= 0.125 + 1e-9


def test_about_as_many_questions_decide_in_four_of_five_samples():
    generator = np.random.default_rng(3)
    truth = [0.3, -0.3] * 35 + [0.3] * 10  # mean 0.0375
    needed = len(truth) + (questions_needed(truth) or 0)
    decided = 0
    for _ in range(400):
        sample = generator.choice(truth, needed)
        decided += abs(sample.mean()) > 1.96 * sample.std(ddof=1) / np.sqrt(needed)
    assert 0.72 < decided / 400 < 0.9
