"""Reward functions: from texts to the numbers that GRPO maximizes.

A reward scores a whole batch: `f(prompts, completions, answers) -> list[float]`, one number per
completion. Built in are `correctness` (the right number) and four that score style; a user function
is named as `module:function` and may have TRL's signature (user_rewards.py). Words are separated by
whitespace; terms match case-insensitively, also inside words. Every rule counts a term once, so
repetition earns nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from typing import TypedDict

from ..errors import JobFailed, SpecError
from ..graders import grader as graders
from ..user_code import bounded_search
from .problems import Problem
from .user_rewards import KeywordReward, imported, shown

# prompts, completions and answers are equally long; an answer is None if the data has none.
Reward = Callable[[list[str], list[str], list[str | None]], list[float]]

MAX_WEIGHT = 1000.0
_LONGEST_PATTERN = 1000  # characters; compiling a long one takes seconds


@dataclass(frozen=True)
class RewardSpec:
    """One reward of a job: a built-in name or `module:function`, and its weight in the sum."""

    name: str
    weight: float = 1.0

    @property
    def is_own(self) -> bool:
        """Whether it is a user function."""
        return self.name not in NAMES


class CustomOptions(TypedDict, total=False):
    """The options of `custom`, as keywords."""

    min_length: int | None
    max_length: int | None
    required_terms: Sequence[str]
    forbidden_terms: Sequence[str]
    format_pattern: str | None
    format_bonus: float


def parse(text: str) -> RewardSpec:
    """Read `name`, `name=weight`, `module:function` or `module:function=weight`.

    A weight may be negative (a penalty) or 0 (reported, not trained on). Raises SpecError.
    """
    name, equals, weight_text = text.partition("=")
    if name not in NAMES and not _is_import(name):
        raise SpecError(
            "reward",
            f"must be one of {', '.join(NAMES)} or module:function, with =WEIGHT after it or not, "
            f"got {shown(text)}{_hint(name)}",
        )
    try:
        weight = float(weight_text) if equals else 1.0
    except ValueError:
        weight = float("nan")
    if not abs(weight) <= MAX_WEIGHT:  # also true of NaN
        raise SpecError(
            "reward",
            f"the weight of {name} must be a number from -{MAX_WEIGHT:g} to {MAX_WEIGHT:g}, "
            f"got {shown(weight_text)}",
        )
    return RewardSpec(name, weight)


def resolve(
    spec: RewardSpec,
    custom_options: CustomOptions | None = None,
    *,
    columns: Collection[str] = ("answer",),
    grader: str | None = None,
) -> Reward | KeywordReward:
    """Return the function of a spec, without its weight.

    Imports `module:function`; it may take `columns` of the data as keywords. Raises SpecError when
    the import fails, when the signature is unsupported, and for wrong options of `custom`.
    `grader` is the JSON of the reward of that name.
    """
    if spec.name == GRADER:
        return KeywordReward(GRADER, graders.reward(grader or "", columns))
    if spec.name == "custom":
        return custom(**(custom_options or CustomOptions()))
    return _BUILT_IN.get(spec.name) or imported(spec.name, columns)


def correctness(
    prompts: list[str], completions: list[str], answers: list[str | None]
) -> list[float]:
    """Score 1 where the completion's number equals the answer's, else 0 (also without an answer).

    The answer's number is found by `final_number`. So is the completion's, unless the prompt ends
    in `=`: then the completion is the right side of an equation and must begin with the number
    alone. Text after a space or a new line is ignored there.
    """
    triples = zip(prompts, completions, answers, strict=True)
    return [float(_is_correct(prompt, text, answer)) for prompt, text, answer in triples]


def _is_correct(prompt: str, completion: str, answer: str | None) -> bool:
    gold = None if answer is None else final_number(answer)
    if gold is None:
        return False
    if prompt.rstrip().endswith("="):
        return _opening_number(completion) == gold
    return final_number(completion) == gold


def check_answer(problem: Problem) -> None:
    """Check that a problem's answer has a number for `correctness`. Raises SpecError."""
    if problem.place is not None and final_number(problem.answer or "") is None:
        got = "none" if problem.answer is None else shown(problem.answer)
        raise SpecError(
            "dataset",
            f"{problem.place.text}: answer must hold a number for the reward correctness, "
            f"got {got}",
        )


# A sign belongs to the number unless it subtracts ("10-7"); "$" may stand between the two.
# Thousands are grouped by commas or not at all; a dot that ends a sentence is not a decimal point.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)])-)?\$?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
)
_HASHES = re.compile(r"####")
_ANSWER = re.compile(r"answer(?: is|:)", re.IGNORECASE)
_CONTINUATION = re.compile(r"[\w+*/=-]")


def final_number(text: str) -> Decimal | None:
    """Return the final number of a text, or None if it has none.

    The first of: the first number after the last `####` (GSM8K's mark); the first number after
    the last "answer is" or "answer:"; the last number. `$`, `%` and the commas of thousands do not
    count, so "$1,200.00" and "1200" are equal; fractions and powers of ten are not read.
    """
    for mark in (_HASHES, _ANSWER):
        last_mark = _last(mark, text)
        if last_mark and (number := _NUMBER.search(text, last_mark.end())):
            return _value(number)
    last_number = _last(_NUMBER, text)
    return _value(last_number) if last_number else None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    matches = list(pattern.finditer(text))
    return matches[-1] if matches else None


def _opening_number(text: str) -> Decimal | None:
    """Return the number at the start of a text, unless a letter or an operator follows it."""
    text = text.lstrip()
    number = _NUMBER.match(text)
    return None if number is None or _CONTINUATION.match(text, number.end()) else _value(number)


def _value(number: re.Match[str]) -> Decimal:
    return Decimal((number["sign"] or "") + number["digits"].replace(",", ""))


_MATH_TERMS = ("answer", "solution", "calculate", "solve", "=", "+", "-", "*", "/", "step")
_STEP_WORDS = ("first", "then", "next", "therefore", "so", "because")
_ANSWER_PATTERNS = ("the answer is", "answer:", "= ")
_REFUSALS = ("sorry", "cannot", "don't know")
_SIGNS = ("+", "-", "*", "/", "=")


def score_math(text: str) -> float:
    """Score how much a text looks like a worked solution, in [-0.9, 1.4]."""
    num_words, lower = len(text.split()), text.lower()
    score = 0.3 if 10 <= num_words <= 100 else -0.5 if num_words < 5 else 0.0
    score += min(0.1 * _count(_MATH_TERMS, lower), 0.4)
    score += min(0.1 * _count(_STEP_WORDS, lower), 0.3)
    score += 0.4 if _count(_ANSWER_PATTERNS, lower) else 0.0
    return score - (0.4 if _count(_REFUSALS, lower) else 0.0)


def score_general(text: str) -> float:
    """Score the length of a text and the variety of its words, in [-0.5, 0.7]."""
    words = text.lower().split()
    score = 0.4 if 15 <= len(words) <= 80 else -0.5 if len(words) < 5 else 0.0
    return score + 0.3 * len(set(words)) / max(len(words), 1)


def score_reasoning(text: str) -> float:
    """Score the reasoning steps and numbers in a text, in [0, 3]."""
    num_words, lower = len(text.split()), text.lower()
    score = min(0.3 * _count(_STEP_WORDS, lower), 1.5)
    score += 1.0 if len(_NUMBER.findall(text)) >= 2 else 0.0
    score += min(0.2 * _count(_SIGNS, lower), 0.8)
    score += 0.7 if _count(_ANSWER_PATTERNS, lower) else 0.0
    if num_words < 10:
        score -= 0.5
    elif num_words > 120:
        score -= 0.3
    elif 15 <= num_words <= 80:
        score += 0.5
    return min(max(score, 0.0), 3.0)


def custom(
    *,
    min_length: int | None = None,
    max_length: int | None = None,
    required_terms: Sequence[str] = (),
    forbidden_terms: Sequence[str] = (),
    format_pattern: str | None = None,
    format_bonus: float = 0.5,
) -> Reward:
    """Return a reward for length, terms and a format, in [-1, 1 + format_bonus]. Raises SpecError.

    +0.5 when the number of words is within the lengths given (inclusive), -0.5 when it is not; +0.5
    x the share of the required terms that occur; -0.5 when any forbidden term occurs; +format_bonus
    when the regular expression `format_pattern` is found. Options that are not given have no
    effect. A search that takes longer than a second raises JobFailed.
    """
    low, high = min_length or 0, float("inf") if max_length is None else max_length
    if low < 0 or high < low:
        raise _refusal(
            "min_length and max_length must be 0 <= min <= max", f"{min_length}, {max_length}"
        )
    if not all(term.strip() for term in (*required_terms, *forbidden_terms)):
        raise _refusal("required_terms and forbidden_terms must not be empty text", "one that is")
    if not (isfinite(format_bonus) and format_bonus > 0):
        raise _refusal("format_bonus must be a number above 0", str(format_bonus))
    pattern = _compiled(format_pattern) if format_pattern else None
    has_lengths = min_length is not None or max_length is not None
    if not (has_lengths or required_terms or forbidden_terms or pattern):
        raise _refusal("must have a length, terms or a format_pattern", "none of them")
    required = [term.lower() for term in required_terms]
    forbidden = [term.lower() for term in forbidden_terms]

    def score(text: str) -> float:
        lower, total = text.lower(), 0.0
        if has_lengths:
            total += 0.5 if low <= len(text.split()) <= high else -0.5
        if required:
            total += 0.5 * _count(required, lower) / len(required)
        if _count(forbidden, lower):
            total -= 0.5
        if pattern and _is_found(pattern, text):
            total += format_bonus
        return total

    return _of_texts(score)


def _refusal(takes: str, got: str) -> SpecError:
    return SpecError("reward", f"custom: {takes}, got {got}")


def _compiled(pattern: str) -> re.Pattern[str]:
    if len(pattern) > _LONGEST_PATTERN:
        raise _refusal(
            f"format_pattern must be at most {_LONGEST_PATTERN} characters", f"{len(pattern)}"
        )
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise SpecError(
            "reward",
            f"custom: format_pattern must be a regular expression, got {shown(pattern)} ({error})",
        ) from None


def _is_found(pattern: re.Pattern[str], text: str) -> bool:
    try:
        return bounded_search.search(pattern, text) is not None
    except bounded_search.TooSlow:
        raise JobFailed(
            f"custom_format_pattern: takes longer than {bounded_search.LIMIT_S:g} s to search a "
            f"completion of {len(text)} characters: a repetition in a repetition, such as (a+)+, "
            "is written without one of the two"
        ) from None


def _count(terms: Iterable[str], lower: str) -> int:
    """Count the terms that occur in a text in lower case, each once."""
    return sum(term in lower for term in terms)


def _of_texts(score: Callable[[str], float]) -> Reward:
    """Return a reward from a function that scores one completion."""

    def reward(
        prompts: list[str], completions: list[str], answers: list[str | None]
    ) -> list[float]:
        return [score(text) for text in completions]

    return reward


_BUILT_IN: dict[str, Reward] = {
    "correctness": correctness,
    "math": _of_texts(score_math),
    "general": _of_texts(score_general),
    "reasoning": _of_texts(score_reasoning),
}
GRADER = "grader"  # the reward of the option `grader`
NAMES = (*_BUILT_IN, "custom", GRADER)


def _is_import(name: str) -> bool:
    module_name, _, function_name = name.partition(":")
    return all(part.isidentifier() for part in (*module_name.split("."), function_name))


def _hint(name: str) -> str:
    import difflib  # costs 5 ms, only needed here

    close = difflib.get_close_matches(name, NAMES, n=1)
    return f"; did you mean {close[0]}?" if close else ""
