"""The error of a gate over all its comparisons, by simulation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from warmd.daemon.groups.curriculum import Curriculum, Round
from warmd.daemon.groups.stages import level_of
from warmd.jobs.intervals import UNDECIDED, compare


def plan(questions: int, most: int, **parts: Any) -> Curriculum:
    return Curriculum(
        id="curriculum-20261121-184200-x7f2",
        kind="grpo",
        created=0.0,
        name=None,
        tags=[],
        stages=[],
        gate={},
        questions=questions,
        most_questions=most,
        queueing={},
        **parts,
    )


def rounds(questions: int, most: int) -> list[Round]:
    """The comparisons of a gate that stays undecided."""
    found = [Round(questions, "a", "b")]
    while found[-1].questions < most:
        found.append(Round(min(2 * found[-1].questions, most), "a", "b"))
    return found


@pytest.mark.parametrize(("questions", "most"), [(200, 800), (200, 200), (5, 10**6), (60, 100)])
def test_the_comparisons_of_a_gate_spend_five_percent_in_all(questions, most):
    found = rounds(questions, most)
    levels = [
        level_of(plan(questions, most, gate_level=0.05), found[: n + 1]) for n in range(len(found))
    ]
    assert sum(level or 0 for level in levels) == pytest.approx(0.05)
    assert levels == sorted(levels, key=lambda level: level or 0)


def test_a_gate_of_an_earlier_version_keeps_the_level_of_each_comparison():
    assert level_of(plan(200, 800), rounds(200, 800)) is None


def is_decided(generator: np.random.Generator, one: Curriculum, kind: str) -> bool:
    """Whether a gate tells two equally good models apart."""
    first, second = generator.normal(0, 1, (2, one.most_questions))
    if kind == "grid of 0.1":
        first, second = (np.round((0.5 + x / 4).clip(0, 1), 1) for x in (first, second))
    if kind in TWO_VALUES:
        first, second = ((x > 0) * TWO_VALUES[kind] for x in (first, second))
    found = rounds(one.questions, one.most_questions)
    for number, of in enumerate(found, start=1):
        level = level_of(one, found[:number])
        assert level is not None
        seen = compare(first[: of.questions].tolist(), second[: of.questions].tolist())
        if seen.verdict != UNDECIDED and seen.p is not None and seen.p < level:
            return True
    return False


TWO_VALUES = {"right or wrong": 1.0, "0 and 0.1": 0.1}
WIDE = pytest.mark.nightly(
    part="oracles", catches="a gate that decides equals too often at some number of questions"
)
KINDS = ("normal", "grid of 0.1", *TWO_VALUES)
GATES = [(n, kind) for n in (4, 8, 10, 40) for kind in KINDS]


@pytest.mark.parametrize(
    ("questions", "kind", "simulations"),
    [
        (4, "grid of 0.1", 500),
        *(pytest.param(n, kind, 4000, marks=WIDE) for n, kind in GATES),
    ],
)
def test_a_gate_tells_equals_apart_in_one_of_twenty_cases_over_all_its_comparisons(
    questions, kind, simulations
):
    generator = np.random.default_rng([questions, KINDS.index(kind)])
    one = plan(questions, 4 * questions, gate_level=0.05)
    decided = sum(is_decided(generator, one, kind) for _ in range(simulations))
    assert decided / simulations <= 0.057
