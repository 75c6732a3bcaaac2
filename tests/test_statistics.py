"""The statistics of evaluations, against published values and enumeration."""

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest

from warmd.jobs.statistics import (
    BETTER,
    UNDECIDED,
    WORSE,
    bootstrap,
    compare,
    majority,
    mcnemar,
    pass_at_k,
    questions_needed,
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


def test_the_bootstrap_interval_of_a_normal_sample_is_close_to_that_of_theory():
    values = np.random.default_rng(1).normal(0.3, 1, 400).tolist()
    low, high = bootstrap(values)
    half = 1.96 * np.std(values) / 20
    assert (low, high) == pytest.approx((fmean(values) - half, fmean(values) + half), abs=0.01)
    assert bootstrap(values) == (low, high)


def test_the_bootstrap_of_many_values_is_computed_in_parts():
    low, high = bootstrap([0.0, 1.0] * 5000)
    assert (low, high) == pytest.approx((0.49, 0.51), abs=0.002)


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
    assert 0 < found.low < 0.125 < found.high
    assert found.p == mcnemar(30, 5)
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


def test_other_values_are_decided_by_the_paired_bootstrap():
    generator = np.random.default_rng(2)
    first, noises = generator.normal(0, 1, 100).tolist(), generator.normal(0, 0.3, 100)
    second = [value + 0.2 + noise for value, noise in zip(first, noises, strict=True)]
    found = compare(first, second)
    assert (found.verdict, found.p) == (BETTER, None)
    assert compare(first, [value + 0.1 for value in first[:5]] + first[5:]).verdict == UNDECIDED


def test_about_as_many_questions_decide_in_four_of_five_samples():
    generator = np.random.default_rng(3)
    truth = [0.3, -0.3] * 35 + [0.3] * 10  # mean 0.0375
    needed = len(truth) + (questions_needed(truth) or 0)
    decided = 0
    for _ in range(400):
        sample = generator.choice(truth, needed)
        decided += abs(sample.mean()) > 1.96 * sample.std(ddof=1) / np.sqrt(needed)
    assert 0.72 < decided / 400 < 0.9
