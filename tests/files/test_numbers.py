"""Numbers that int64 and float64 cannot hold keep the digits that their file has."""

from __future__ import annotations

import json
import time
from decimal import Decimal

import orjson
import pytest
from hypothesis import given, strategies as st

from warmd.jobs.errors import SpecError
from warmd.jobs.files.jsonl import Place, parse
from warmd.jobs.files.numbers import Digits, loads, written
from warmd.jobs.rewards.problems import load
from warmd.jobs.rewards.rewards import correctness
from warmd.jobs.sft.dataset import Source

LONG = ["12345678901234567890123", "-" + "9" * 5000, "0.12345678901234567891", "1e400", "1e-400"]


@pytest.mark.parametrize("number", LONG)
def test_a_number_beyond_float64_is_learned_and_compared_with_all_its_digits(tmp_path, number):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"question": "q", "answer": {number}}}\n')
    (row,) = Source(dataset=str(path)).load().train
    assert row.learned == f" {number}"
    (problem,) = load(str(path))
    assert problem.answer is not None
    assert Decimal(problem.answer) == Decimal(number)
    assert problem.columns["answer"] == number


def test_a_long_integer_is_correct_only_with_every_digit(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "q", "answer": 12345678901234567890123}\n')
    (problem,) = load(str(path))
    right, wrong = "12345678901234567890123", "12345678901234567890124"
    assert correctness(["", ""], [right, wrong], [problem.answer] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    "text",
    ["1e400", '{"a": [1e400, {"b": 12345678901234567890123}]}', '{"t": "1e400", "n": 1e400}'],
)
def test_long_numbers_are_found_at_any_depth_and_text_is_left_alone(text):
    assert loads(text.encode()) == json.loads(text, parse_int=_number, parse_float=_number)


def _number(text):
    return Digits(text)


@pytest.mark.parametrize("text", ["9007199254740993", "18446744073709551615", "0.1", "1e5", "3.5"])
def test_a_number_that_is_read_exactly_stays_a_number(text):
    value = loads(f'{{"a": {text}}}'.encode())["a"]
    assert type(value) in (int, float)
    assert Decimal(repr(value)) == Decimal(text)


@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_any_decimal_keeps_its_value(number):
    value = loads(f'{{"a": {number}}}'.lower().replace("e+", "e").encode())["a"]
    assert Decimal(written(value)) == number


@given(st.recursive(st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists))
def test_everything_else_is_read_as_orjson_reads_it(value):
    line = orjson.dumps({"a": value})
    assert loads(line) == orjson.loads(line)


@pytest.mark.parametrize(
    "line", [b'{"a": NaN}', b'{"a": 1e400, "b": NaN}', b'{"a": 1e400, "b": "\\ud800"}']
)
def test_what_json_does_not_have_is_refused_by_line_also_after_a_long_number(line):
    with pytest.raises(SpecError, match=r"^data: x.jsonl, line 3: must be a JSON object, got "):
        parse(line, Place.of_line("data", "x.jsonl", 3))


def test_no_line_of_digits_takes_long():
    line = b'{"a": 1e999, "b": [' + b",".join([b"1" * 299] * 20_000) + b"]}"
    begun = time.monotonic()
    loads(line)
    assert time.monotonic() - begun < 5
    assert loads(b"[1e999, 1" + b"0" * 400 + b"]") == ["1e999", "1" + "0" * 400]
