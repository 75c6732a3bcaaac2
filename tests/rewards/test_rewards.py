"""Rewards: every rule with a manually computed score, and the results of user functions."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from decimal import Decimal

import pytest
from hypothesis import given, settings, strategies as st

from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.files.jsonl import Place
from warmd.jobs.rewards.problems import Problem
from warmd.jobs.rewards.rewards import (
    GRADER,
    NAMES,
    CustomOptions,
    Reward,
    RewardSpec,
    check_answer,
    correctness,
    custom,
    final_number,
    parse,
    resolve,
    score_general,
    score_math,
    score_reasoning,
)
from warmd.jobs.rewards.user_rewards import KeywordReward


def words(count: int) -> str:
    """Return that many different words, without terms, numbers or signs in them."""
    return " ".join("w" + "x" * i for i in range(count))


def by_position(spec: RewardSpec, options: CustomOptions | None = None) -> Reward:
    reward = resolve(spec, options)
    assert not isinstance(reward, KeywordReward)
    return reward


def refusal(function: Callable[..., object], *args: object) -> str:
    with pytest.raises(SpecError) as caught:
        function(*args)
    assert caught.value.field == "reward"
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("", -0.5),
        (words(4), -0.5),
        (words(5), 0.0),
        (words(9), 0.0),
        (words(10), 0.3),
        (words(100), 0.3),
        (words(101), 0.0),
        # One term of the ten; five of them reach the cap of 0.4.
        (words(4) + " Calculate", 0.1),
        (words(3) + " ANSWER + - * / answer", 0.4),
        # One step word; all six reach the cap of 0.3 ("so" counts inside "also", too).
        (words(4) + " therefore", 0.1),
        (words(4) + " also", 0.1),
        (words(3) + " first then next therefore so because", 0.3),
        # An answer pattern: 0.4, and the term "answer" in it 0.1; "= " is the term "=".
        (words(4) + " The answer is", 0.5),
        (words(4) + " Answer:", 0.5),
        (words(4) + " x= y", 0.5),
        (words(4) + " x=y", 0.1),
        # A refusal, once; "sorry" holds the step word "so".
        (words(4) + " I cannot", -0.4),
        (words(4) + " I don't know and cannot", -0.4),
        (words(4) + " Sorry", -0.3),
        (words(2) + " cannot", -0.9),
        # 16 words: 0.3; solve, =, +: 0.3; first, so: 0.2; the answer pattern: 0.4.
        ("First we solve it: we have 3 + 4 = 7 apples, so it is 7.", 1.2),
    ],
)
def test_math_scores_follow_the_rules(text, score):
    assert score_math(text) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("", -0.5),
        (words(4), -0.2),  # -0.5, and all four are unique
        ("a A a b", -0.5 + 0.15),  # two of four: case does not make a word another one
        (words(5), 0.3),
        (words(14), 0.3),
        (words(15), 0.7),
        (words(80), 0.7),
        (words(81), 0.3),
        (" ".join(["same"] * 20), 0.4 + 0.3 / 20),
    ],
)
def test_general_scores_follow_the_rules(text, score):
    assert score_general(text) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("", 0.0),  # -0.5, clamped
        (words(14), 0.0),
        (words(15), 0.5),
        (words(80), 0.5),
        (words(81), 0.0),
        # Ten words are neither short nor of the right length: what follows counts alone.
        (words(9) + " then", 0.3),
        (words(4) + " first then next therefore so because", 1.5),
        (words(9) + " 12", 0.0),
        (words(9) + " 12 1,200.5", 1.0),
        (words(9) + " +", 0.2),
        (words(9) + " +-*/=", 0.8),
        (words(9) + " answer:", 0.7),
        (words(8) + " then", 0.0),  # 0.3 - 0.5
        (words(7) + " so then", 0.1),  # 0.6 - 0.5
        (words(118) + " so then", 0.6),
        (words(119) + " so then", 0.3),  # 121 words: -0.3
        # 1.5 + 1.0 + 0.8 + 0.7 + 0.5 is clamped to 3.
        ("first then next therefore so because 1 + 2 - 3 * 4 / 5 = 6", 3.0),
    ],
)
def test_reasoning_scores_follow_the_rules(text, score):
    assert score_reasoning(text) == pytest.approx(score)


@pytest.mark.parametrize(
    ("options", "text", "score"),
    [
        ({"min_length": 2}, "one", -0.5),
        ({"min_length": 2}, "one two", 0.5),
        ({"min_length": 2, "max_length": 3}, "one two three", 0.5),
        ({"max_length": 3}, "one two three four", -0.5),
        ({"max_length": 0}, "", 0.5),
        ({"required_terms": ("Alpha", "beta")}, "an ALPHA", 0.25),
        ({"required_terms": ("Alpha", "beta")}, "alphabeta", 0.5),
        ({"forbidden_terms": ("x", "y")}, "X and Y", -0.5),
        ({"forbidden_terms": ("x", "z")}, "neither", 0.0),
        ({"format_pattern": r"^<a>\d+</a>$"}, "<a>12</a>", 0.5),
        ({"format_pattern": r"^<a>\d+</a>$"}, "12", 0.0),
        ({"format_pattern": "b", "format_bonus": 2.0}, "abc", 2.0),
        ({"min_length": 9, "required_terms": ["q"], "forbidden_terms": ["a"]}, "a", -1.0),
        ({"max_length": 9, "required_terms": ["q"], "format_pattern": "q"}, "q", 1.5),
    ],
)
def test_custom_scores_follow_the_options(options, text, score):
    assert custom(**options)(["p"], [text], [None]) == [pytest.approx(score)]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "custom: must have a length, terms or a format_pattern, got none of them"),
        (
            {"min_length": 5, "max_length": 4},
            "custom: min_length and max_length must be 0 <= min <= max, got 5, 4",
        ),
        (
            {"min_length": -1},
            "custom: min_length and max_length must be 0 <= min <= max, got -1, None",
        ),
        (
            {"required_terms": ("a", " ")},
            "custom: required_terms and forbidden_terms must not be empty text, got one that is",
        ),
        (
            {"format_pattern": "(", "format_bonus": 1.0},
            "custom: format_pattern must be a regular expression, got '(' "
            "(missing ), unterminated subpattern at position 0)",
        ),
        (
            {"format_pattern": "a", "format_bonus": math.inf},
            "custom: format_bonus must be a number above 0, got inf",
        ),
        (
            {"format_pattern": "a", "format_bonus": 0.0},
            "custom: format_bonus must be a number above 0, got 0.0",
        ),
    ],
)
def test_custom_refuses_options_that_cannot_score(options, problem):
    assert refusal(resolve, RewardSpec("custom"), options) == f"reward: {problem}"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", "72"),
        ("#### 1 then 5\n#### 72 apples and 3 pears", "72"),
        ("6 x 12 = <<6*12=72>>72\n#### $1,072.50.", "1072.5"),
        ("####\nThe answer is 8.", "8"),  # nothing after the mark: the next rule
        ("The answer is 3. No, the ANSWER IS: -4, as 5 - 9 = -4 is 1", "-4"),
        ("Answer: 50% of 8", "50"),
        ("the answer is clear: none. It takes 12 of 13", "12"),
        ("We get 7.0", "7"),
        ("We get 7.", "7"),
        ("48 + 24 = 72", "72"),
        ("10-7", "7"),
        ("10 - (-7)", "-7"),
        ("it costs -$5", "-5"),
        ("$.50", "0.5"),
        ("wait 2...3", "3"),
        ("1,2", "2"),
        ("1,234,567", "1234567"),
        ("1,2345", "2345"),
        ("none at all, seven", None),
        ("", None),
    ],
)
def test_the_number_of_a_text_is_found(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("So 40 + 32 makes 72.", "40+32 = <<40+32=72>>72\n#### 72", 1.0),
        ("The answer is 7.0 apples", "7", 1.0),
        ("The answer is $1,200", "#### 1200", 1.0),
        ("I get 71", "#### 72", 0.0),
        ("I get -72", "#### 72", 0.0),
        ("seventy-two", "#### 72", 0.0),
        ("", "#### 72", 0.0),
        ("72", None, 0.0),
        ("no number", "no number", 0.0),
    ],
)
def test_correctness_compares_the_number_of_a_solution(completion, answer, score):
    assert correctness(["How many?"], [completion], [answer]) == [score]


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("75", 1.0),
        (" 75\n", 1.0),
        ("75\n12+3=15", 1.0),
        ("75 99 12", 1.0),
        ("75.", 1.0),
        ("175", 0.0),
        ("751", 0.0),
        ("75.5", 0.0),
        ("-75", 0.0),
        ("75+1", 0.0),
        ("75=75", 0.0),
        ("75x", 0.0),
        ("12\n75", 0.0),
        ("=75", 0.0),
        ("", 0.0),
    ],
)
def test_the_right_side_of_an_equation_must_start_the_completion(completion, score):
    assert correctness(["17+58="], [completion], ["75"]) == [score]


def test_answers_without_a_number_are_refused_for_correctness():
    place = Place.of_line("dataset", "FILE", 9)
    for good in ("#### 1", "2"):
        check_answer(Problem("p", good, 9, place=place))
    for answer, got in [(None, "none"), ("seven", "'seven'")]:
        with pytest.raises(SpecError) as caught:
            check_answer(Problem("r", answer, 9, place=place))
        assert str(caught.value) == (
            "dataset: FILE, line 9: answer must hold a number for the reward correctness, "
            f"got {got}"
        )


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("math", RewardSpec("math", 1.0)),
        ("correctness=2.5", RewardSpec("correctness", 2.5)),
        ("general=-1e-3", RewardSpec("general", -0.001)),
        ("custom=0", RewardSpec("custom", 0.0)),
        ("math=-1000", RewardSpec("math", -1000.0)),
        ("my.rewards:brevity", RewardSpec("my.rewards:brevity", 1.0)),
        ("my.rewards:brevity=0.5", RewardSpec("my.rewards:brevity", 0.5)),
    ],
)
def test_a_reward_is_a_name_with_or_without_a_weight(text, spec):
    assert parse(text) == spec


@pytest.mark.parametrize("weight", ["", "x", "nan", "inf", "1001", "-1e9", "1=2"])
def test_an_invalid_weight_is_refused(weight):
    assert refusal(parse, f"math={weight}") == (
        f"reward: the weight of math must be a number from -1000 to 1000, got '{weight}'"
    )


@pytest.mark.parametrize("text", ["", "=1", "matth", "a.b", ":f", "m:", "m:f:g", "1m:f", "m n:f"])
def test_an_unknown_reward_is_refused_with_the_known_ones(text):
    message = refusal(parse, text)
    assert message.startswith(
        "reward: must be one of correctness, math, general, reasoning, custom, grader or "
        f"module:function, with =WEIGHT after it or not, got {text!r}"
    )


def test_an_unknown_reward_hints_at_the_one_that_is_close():
    assert refusal(parse, "mth=2").endswith("got 'mth=2'; did you mean math?")


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Return a function that writes a module and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(code: str) -> str:
        name = f"reward_of_{tmp_path.name}_{len(list(tmp_path.iterdir()))}"
        (tmp_path / f"{name}.py").write_text(code)
        return name

    return write


def test_a_users_function_scores_by_prompts_completions_and_answers(user_module):
    module = user_module(
        "def f(prompts, completions, answers):\n"
        "    rows = zip(prompts, completions, answers)\n"
        "    return [len(p) + len(c) + (a is None) for p, c, a in rows]"
    )
    reward = by_position(parse(f"{module}:f=2"))
    scores = reward(["p", "pp"], ["c", ""], ["1", None])
    assert scores == [2.0, 3.0]
    assert all(type(score) is float for score in scores)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("", "{}:f must be a function of {}, got no such name"),
        ("f = 3", "{}:f must be a function of {}, got a int"),
        ("1/0", "{}:f must import, got ZeroDivisionError: division by zero"),
        ("def", "{}:f must import, got SyntaxError: invalid syntax ({}.py, line 1)"),
        ("raise SystemExit(0)", "{}:f must import, got SystemExit: 0"),
    ],
)
def test_a_user_function_that_cannot_be_imported_is_refused(user_module, code, problem):
    module = user_module(code)
    expected = problem.replace("{}", module)
    assert refusal(resolve, RewardSpec(f"{module}:f")) == f"reward: {expected}"


def test_a_file_instead_of_a_module_is_refused_with_the_module():
    assert refusal(resolve, parse("mine.py:f")) == (
        "reward: must be MODULE:NAME, got mine.py:f: type mine:f"
    )


def test_a_module_that_does_not_exist_is_refused():
    assert refusal(resolve, parse("no_such_module_at_all:f")) == (
        "reward: no_such_module_at_all:f must import, got ModuleNotFoundError: "
        "No module named 'no_such_module_at_all'"
    )


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ("None", "got a NoneType"),
        ("'12'", "got a str"),
        ("1.0", "got a float"),
        ("[1.0]", "got 1"),
        ("[1.0, None]", "got None for completion 2"),
        ("['1', 2]", "got '1' for completion 1"),
        ("[0, float('nan')]", "got nan for completion 2"),
        ("[0, 10**400]", "got 1" + "0" * 76 + "... for completion 2"),
        ("[0, 10**5000]", "got an object of type int for completion 2"),
        (
            "[type('Broken', (), {'__float__': lambda self: 1 / 0})()] * 2",
            "got a list that cannot be read: ZeroDivisionError: division by zero",
        ),
    ],
)
def test_a_user_function_with_an_invalid_result_fails_the_job(user_module, result, problem):
    module = user_module(f"def f(prompts, completions, answers):\n    return {result}")
    reward = by_position(RewardSpec(f"{module}:f"))
    with pytest.raises(JobFailed) as caught:
        reward(["p", "q"], ["a", "b"], [None, None])
    assert str(caught.value) == (
        f"reward {module}:f must return a list of 2 finite numbers, {problem}"
    )


TERMS = ["answer", "= ", "so", "then", "#### ", "answer is ", "-1,000.5", "$", "sorry", "\n", "7 "]
TEXT = st.text() | st.lists(st.sampled_from(TERMS)).map("".join)
RANGES = {
    "correctness": (0.0, 1.0),
    "math": (-0.9, 1.4),
    "general": (-0.5, 0.7),
    "reasoning": (0.0, 3.0),
    "custom": (-1.0, 1.25),
}


@settings(max_examples=200)
@given(prompt=TEXT | st.just("1+1="), completion=TEXT, answer=st.none() | TEXT)
def test_rewards_of_any_text_stay_in_their_range(prompt, completion, answer):
    options: CustomOptions = {
        "min_length": 2,
        "max_length": 4,
        "required_terms": ("answer", "so"),
        "forbidden_terms": ("$",),
        "format_pattern": "[0-9]",
        "format_bonus": 0.25,
    }
    for name in [name for name in NAMES if name != GRADER]:  # graders: tests/graders
        (score,) = by_position(RewardSpec(name), options)([prompt], [completion], [answer])
        low, high = RANGES[name]
        assert low - 1e-9 <= score <= high + 1e-9


@given(
    number=st.decimals(min_value=-(10**9), max_value=10**9, places=2),
    before=st.sampled_from(["", "We had 12. ", "So x = ", "#### ", "The answer is $"]),
    after=st.sampled_from(["", ".", "%", "\n", " apples"]),
)
def test_a_number_is_found_in_any_notation(number, before, after):
    assert final_number(f"{before}{number}{after}") == number
    sign, digits = ("-" if number < 0 else ""), f"{abs(number):,}"
    assert final_number(f"{before}{sign}${digits}{after}") == number


@settings(max_examples=300)
@given(text=st.text() | st.builds("{}={}".format, st.sampled_from(NAMES), st.text()))
def test_any_text_is_a_reward_or_refused_in_one_line(text):
    spec = refused = None
    try:
        spec = parse(text)
    except SpecError as error:
        refused = str(error)
    assert (spec and math.isfinite(spec.weight)) or len((refused or "").splitlines()) == 1


ENDLESS = pytest.mark.nightly(
    part="oracles", catches="a form of pattern whose search no time limit ends"
)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"(a+)+$", "a" * 40 + "b"),
        pytest.param(r"(a|aa)+$", "a" * 60 + "b", marks=ENDLESS),
        pytest.param(r"(?:a?){40}a{40}", "a" * 40, marks=ENDLESS),
        pytest.param(r"(?=(a+)+$)", "a" * 40 + "b", marks=ENDLESS),
        pytest.param(r".*.*.*.*.*=z", "=" * 3000, marks=ENDLESS),
        pytest.param(r"(\w*)\1{3,}z", "ab" * 20_000, marks=ENDLESS),
    ],
)
def test_an_endless_pattern_search_ends_with_the_name_of_its_option(pattern, text):
    reward = custom(format_pattern=pattern)
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    begun = time.thread_time()
    with pytest.raises(JobFailed, match=r"^custom_format_pattern: takes longer than 1 s") as caught:
        reward(["?"], [text], [None])
    assert time.thread_time() - begun < 1.5
    assert "\n" not in str(caught.value)
    assert reward(["?"], ["b"], [None]) == [0.0]
    after = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert after == before  # of this test's own timeout


@pytest.mark.slow
def test_a_pattern_is_short_and_compiles_in_moments():
    with pytest.raises(SpecError, match=r"at most 1000 characters, got 1001"):
        custom(format_pattern="x" * 1001)
    begun = time.thread_time()
    custom(format_pattern="(?i)" + "[\0-\U0010ffff]" * 199)
    custom(format_pattern="a{1000000}" * 100)
    with pytest.raises(SpecError, match="must be a regular expression"):
        custom(format_pattern="(" * 1000)
    assert time.thread_time() - begun < 10
