"""Graders of OpenAI's API: their scores, and one-line errors for unsupported ones."""

from __future__ import annotations

import random
import time
from typing import Any

import orjson
import pytest
from hypothesis import given, settings, strategies as st

from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.graders import grader, similarity
from warmd.jobs.graders.formula import Formula
from warmd.jobs.graders.template import Template

CHECK = {
    "type": "string_check",
    "name": "answer",
    "operation": "eq",
    "input": "{{sample.output_text}}",
    "reference": "{{ item.answer }}",
}
SIMILAR = {
    "type": "text_similarity",
    "name": "close",
    "evaluation_metric": "fuzzy_match",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
}
BOTH = {
    "type": "multi",
    "name": "both",
    "graders": {"exact": CHECK, "close": SIMILAR},
    "calculate_output": "0.75 * exact + 0.25 * close",
}


def score(values: dict[str, Any], output: str, **item: Any) -> float:
    return grader.read(orjson.dumps(values).decode()).score(output, item)


def refusal(values: Any) -> str:
    with pytest.raises(SpecError) as caught:
        grader.read(orjson.dumps(values).decode())
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("operation", "output", "expected"),
    [
        ("eq", "Paris", 1),
        ("eq", "paris", 0),
        ("ne", "paris", 1),
        ("like", "It is Paris.", 1),
        ("like", "It is paris.", 0),
        ("ilike", "It is paris.", 1),
    ],
)
def test_string_check(operation, output, expected):
    assert score({**CHECK, "operation": operation}, output, answer="Paris") == expected


@pytest.mark.parametrize("text", ["{{" + " " * 90_000, "{{ " * 30_000, "{{a" * 30_000 + "}"])
def test_no_text_of_a_template_takes_long(text):
    begun = time.monotonic()
    assert Template("grader", "input", text, grader.MOST_FILLED).columns == []
    assert time.monotonic() - begun < 1


def test_a_template_that_becomes_too_long_ends_by_name_and_not_in_memory():
    reference = "{{item.a}}" * 9_000
    with pytest.raises(SpecError) as caught:
        score({**CHECK, "reference": reference}, "3", a="3" * 10_000)
    found = "reference of the grader must have at most 1000000 characters, filled in"
    assert str(caught.value) == f"grader: {found}"


def test_templates_take_columns_inside_objects_and_numbers():
    values = {**CHECK, "reference": "{{item.gold.value}}"}
    assert score(values, "3", gold={"value": 3}) == 1
    assert score(values, "", gold={}) == 1


@pytest.mark.parametrize(
    ("metric", "output", "reference", "expected"),
    [
        ("fuzzy_match", "kitten", "sitting", 2 * 4 / 13),
        ("fuzzy_match", "", "", 1.0),
        ("rouge_1", "the cat sat", "the cat ran fast", 2 * 2 / 7),
        ("rouge_2", "the cat sat", "the cat ran fast", 2 * 1 / 5),
        ("rouge_5", "one two", "one two", 0.0),
        ("rouge_l", "The cat, sat", "the dog sat", 2 * 2 / 6),
        ("gleu", "the cat sat", "the cat sat", 1.0),
        ("gleu", "the cat", "the dog", 1 / 3),
        ("bleu", "the cat sat on the mat", "the cat sat on the mat", 1.0),
        ("bleu", "dog", "cat", 0.0),
    ],
)
def test_text_similarity(metric, output, reference, expected):
    found = score({**SIMILAR, "evaluation_metric": metric}, output, answer=reference)
    assert found == pytest.approx(expected)


@settings(max_examples=200)
@given(one=st.text("ab ", max_size=12), other=st.text("abc ", max_size=12))
def test_every_metric_is_between_0_and_1_and_symmetric_where_it_should_be(one, other):
    for name, metric in similarity.METRICS.items():
        assert 0 <= metric(one, other) <= 1 + 1e-9, name
    assert similarity.fuzzy_match(one, other) == similarity.fuzzy_match(other, one)


def test_the_common_subsequence_is_the_longest():
    def plain(one: str, other: str) -> int:
        if not one or not other:
            return 0
        if one[-1] == other[-1]:
            return plain(one[:-1], other[:-1]) + 1
        return max(plain(one[:-1], other), plain(one, other[:-1]))

    draw = random.Random(0)
    for _ in range(100):
        one, other = ("".join(draw.choices("abc", k=draw.randrange(7))) for _ in range(2))
        assert similarity.lcs(one, other) == plain(one, other)


def test_multi_adds_up_by_its_formula():
    assert score(BOTH, "42", answer="42") == 1
    assert score(BOTH, "4", answer="42") == pytest.approx(0.25 * 2 / 3)
    powers = {**BOTH, "calculate_output": "max(exact, close) ^ 2 - min(exact, 0.5) / 2"}
    assert score(powers, "42", answer="42") == 0.75


@pytest.mark.parametrize(
    "formula",
    [
        *("", "exact +", "unknown", "exact.real", "__import__('os')", "exact if close else 1"),
        *("exact[0]", "'text'", "exact and close", "lambda: 1", "min(key=exact)", "min()"),
        *("exact ** close", "-" * 999 + "1", "True", "min", "exact(1)"),
    ],
)
def test_a_formula_is_arithmetic_and_nothing_else(formula):
    assert refusal({**BOTH, "calculate_output": formula}).startswith("grader: calculate_output of")


@pytest.mark.parametrize("formula", ["a / (a - a)", "log(0 * a)", "10 ^ 400 * a", "9" * 400])
def test_a_formula_without_a_value_fails_in_one_line(formula):
    with pytest.raises(JobFailed, match=r"^grader: "):
        Formula("grader", "it", formula, ["a"])({"a": 1.0})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "type of the grader must be one of string_check, "),
        ({"type": "score_model"}, "type of the grader must be one of"),
        ({"type": ["multi"]}, "type of the grader must be one of"),
        ({**CHECK, "operation": "is"}, "operation of the grader must be one of eq, ne"),
        ({**CHECK, "extra": 1}, "the grader (string_check): extra is unknown"),
        ({**CHECK, "input": 3}, "input of the grader must be text"),
        ({**CHECK, "input": "{{ os.environ }}"}, "input of the grader must name sample.output_"),
        (
            {"type": "string_check", "operation": "eq", "input": ""},
            "the grader (string_check) must have input, operation, reference, got no reference",
        ),
        ({**SIMILAR, "evaluation_metric": "cosine"}, "got 'cosine', which needs an embedding"),
        ({**SIMILAR, "evaluation_metric": "meteor"}, "got 'meteor', which needs a dictionary"),
        ({**BOTH, "graders": {}}, "graders of the grader must be an object"),
        ({**BOTH, "graders": {"a": BOTH}}, "graders of the grader must not be multi, got a"),
        (
            {**BOTH, "graders": {"judge": {"type": "score_model"}}},
            "type of judge must be one of",
        ),
        (
            {"type": "python", "name": "p", "source": "def grade(sample, item): return 1"},
            "source of the grader must be module:function of this machine",
        ),
    ],
)
def test_an_invalid_grader_is_refused_by_its_field(values, message):
    assert message in refusal(values)


def test_a_reward_of_a_grader_needs_its_columns():
    text = orjson.dumps(BOTH).decode()
    with pytest.raises(SpecError, match=r"^grader: item.answer must be a column of the data"):
        grader.reward(text, ["question"])
    reward = grader.reward(text, ["answer"])
    chat = [{"role": "assistant", "content": "2"}]
    assert reward(prompts=["", ""], completions=["1", chat], answer=["1", "1"]) == [1.0, 0.0]


def test_a_python_grader_is_a_function_of_a_module(tmp_path, monkeypatch):
    (tmp_path / "grades.py").write_text(
        "def grade(sample, item):\n    return len(sample['output_text']) / item['most']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    values = {"type": "python", "name": "length", "source": "grades:grade"}
    reward = grader.reward(orjson.dumps(values).decode(), ["most"])
    assert reward(completions=["ab"], most=[4]) == [0.5]
    with pytest.raises(JobFailed, match=r"^grader grades:grade failed: "):
        reward(completions=["ab"], most=[0])
    missing = orjson.dumps({**values, "source": "grades:nothing"}).decode()
    with pytest.raises(SpecError, match=r"^grader: grades:nothing must be a function"):
        grader.reward(missing, [])
