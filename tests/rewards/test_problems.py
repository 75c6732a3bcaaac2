"""Problems: the accepted forms of a data set, and one-line errors for others."""

from __future__ import annotations

import os
from typing import Any

import orjson
import pytest
from hypothesis import given, settings, strategies as st

from warmd.jobs.data.reader import Reading
from warmd.jobs.data.sources import TAKES
from warmd.jobs.errors import SpecError
from warmd.jobs.rewards.problems import (
    Problem,
    columns_fingerprint,
    columns_of,
    fingerprint,
    iter_arithmetic,
    load,
    load_both,
)


@pytest.fixture
def dataset(tmp_path):
    """Return a function that writes a JSONL file of rows (bytes go in as they are)."""

    def write(*rows):
        path = tmp_path / "rows.jsonl"
        lines = [row if isinstance(row, bytes) else orjson.dumps(row) for row in rows]
        path.write_bytes(b"\n".join(lines))
        return str(path)

    return write


def refusal(source: str, read: Any = load, **options: Any) -> str:
    with pytest.raises(SpecError) as caught:
        read(source, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(source, "FILE") if source else message


def test_a_question_is_the_prompt_unless_there_is_a_template(dataset):
    source = dataset({"question": "How many?", "answer": "So 3.\n#### 3"})
    assert load(source) == [Problem("How many?", "So 3.\n#### 3", 1)]
    (problem,) = load(source, template="Q: {question}\nA:")
    assert problem.prompt == "Q: How many?\nA:"


def test_braces_other_than_the_question_are_plain_text(dataset):
    source = dataset({"question": "is {0} {question} {x!r}?"})
    (problem,) = load(source, template='{"q": {question}} {}')
    assert problem.prompt == '{"q": is {0} {question} {x!r}?} {}'


def test_a_prompt_is_used_unchanged_with_or_without_an_answer(dataset):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    source = dataset({"prompt": "2+2=", "answer": 4}, {"prompt": messages, "question": "unused"})
    assert load(source) == [Problem("2+2=", "4", 1), Problem(messages, None, 2)]


@pytest.mark.parametrize(
    ("answer", "text"),
    [("12", "12"), (-3, "-3"), (7.5, "7.5"), (1e22, "1" + "0" * 22), (None, None)],
)
def test_an_answer_is_text_or_a_number(dataset, answer, text):
    (problem,) = load(dataset({"prompt": "p", "answer": answer}))
    assert problem.answer == text


def test_samples_are_distinct_prompts_and_the_first_row_of_each_counts(dataset):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "2"}, b"", {"prompt": "b"}]
    source = dataset(*rows)
    expected = [Problem("a", "1", 1), Problem("b", None, 4)]
    assert load(source, samples=2) == load(source) == expected


def test_more_samples_than_distinct_prompts_are_refused_with_both_numbers(dataset):
    source = dataset({"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"})
    assert refusal(source, samples=3) == (
        "samples: must be at most 2 (the distinct prompts of FILE), got 3"
    )
    assert refusal("arithmetic", samples=4051).startswith("samples: must be at most 4050 ")
    assert refusal("arithmetic", samples=0) == "samples: must be at least 1, got 0"


def test_evaluation_takes_the_prompts_after_those_of_the_training(dataset):
    source = dataset(*({"prompt": p} for p in "abacbd"))
    for samples in (2, None):
        train, held_out = load_both(source, samples=samples, held_out=2)
        assert [p.prompt for p in train] == ["a", "b"]
        assert [p.prompt for p in held_out] == ["c", "d"]
    assert refusal(source, read=load_both, samples=2, held_out=3) == (
        "eval_samples: must be at most 2 (the distinct prompts of FILE after the 2 of the "
        "training), got 3"
    )
    assert refusal(source, read=load_both, held_out=4) == (
        "eval_samples: must be below 4 (the distinct prompts of FILE), got 4"
    )
    assert refusal("arithmetic", read=load_both, held_out=1001) == (
        "eval_samples: must be at most 1000 (the distinct prompts of FILE), got 1001"
    )


def test_a_data_set_without_a_usable_record_is_refused_with_the_reason(dataset):
    source = dataset({"prompt": 3})
    assert refusal(source, read=load_both, held_out=0, reading=Reading(skips_bad_rows=True)) == (
        "dataset: must have a prompt, got FILE: 1 bad rows, the first: dataset: FILE, line 1: "
        "prompt: must be text, got a number"
    )


def test_lines_after_the_last_sample_are_not_read(dataset):
    source = dataset({"prompt": "a"}, {"prompt": "b"}, b"{broken")
    assert len(load(source, samples=2)) == 2
    assert "line 3" in refusal(source)


def test_a_byte_order_mark_is_skipped(dataset):
    assert load(dataset(b'\xef\xbb\xbf{"prompt": "a"}\r\n')) == [Problem("a", None, 1)]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b"{broken", "must be a JSON object, got "),
        (b'{"prompt": "caf\xe9"}', "must be UTF-8, got byte 0xe9"),
        (["prompt"], "must be a JSON object, got a list"),
        (
            {"text": "x"},
            "must be an object with question, prompt or messages, got the keys ['text']",
        ),
        ({"question": 7}, "question: must be text, got a number"),
        ({"question": " \n"}, "question: must be text, got an empty one"),
        ({"prompt": None}, "prompt: must be text, got null"),
        ({"prompt": []}, "prompt: must be text or chat messages, got an empty list"),
        (
            {"prompt": ["hi"]},
            "prompt[0]: must be an object of role and content, got text",
        ),
        (
            {"prompt": [{"role": "user", "content": "hi", "tool_calls": [1]}]},
            "prompt[0]: must be an object of role and content (and, for user, of name), "
            "got the keys ['content', 'role', 'tool_calls']",
        ),
        (
            {"prompt": [{"role": "user", "content": ["hi"]}]},
            "prompt[0]: content[0]: must be a part of type text, with its text, got text",
        ),
        ({"prompt": "p", "answer": True}, "answer: must be text or a number, got true or false"),
        ({"prompt": "p", "answer": {}}, "answer: must be text or a number, got an object"),
    ],
)
def test_a_bad_row_is_named_with_its_line(dataset, row, problem):
    message = refusal(dataset({"prompt": "fine"}, row))
    assert message.startswith("dataset: FILE, line 2")
    assert problem in message


def test_an_invalid_data_set_is_refused_with_the_reason(tmp_path, dataset):
    takes = f"dataset: must be {TAKES} or arithmetic, got"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert refusal(str(tmp_path / "none")) == f"{takes} FILE: No such file or directory"
    (tmp_path / "empty").mkdir()
    assert refusal(str(tmp_path / "empty")) == (
        f"{takes} FILE: no .jsonl, .json, .csv, .parquet, .arrow file in it"
    )
    assert refusal(str(pipe)) == f"{takes} FILE: not a regular file"
    assert refusal(dataset(b"\n\n")) == f"{takes} FILE: no rows in it"
    assert refusal("") == f"{takes} '': No such file or directory"
    assert refusal("a\0b").startswith(f"{takes} 'a\\x00b': ")
    assert refusal("x" * 5000) == f"{takes} FILE: File name too long"


def test_a_file_without_line_ends_is_not_read_whole(tmp_path):
    path = tmp_path / "weights.bin"
    with open(path, "wb") as file:
        file.truncate(2**40)  # sparse: takes no room
    assert refusal(str(path)) == "dataset: FILE, line 1: must be at most 64 MiB, got more"


def test_a_template_without_the_question_is_refused(dataset):
    source = dataset({"question": "q"})
    assert refusal(source, template="{Question}") == (
        "template: must be as-is, math, qa, or contain {question}, got '{Question}'"
    )


def terms(problem: Problem) -> list[int]:
    assert isinstance(problem.prompt, str)
    return [int(number) for number in problem.prompt.removesuffix("=").split("+")]


def test_arithmetic_has_many_sums_in_a_fixed_order():
    assert load("arithmetic", samples=1) == [Problem("85+7=", "92", 1001)]
    problems = load("arithmetic", samples=80)
    assert [p.prompt for p in problems[:4]] == ["85+7=", "82+66=", "97+9=", "58+96="]
    for problem in load("arithmetic"):
        a, b = terms(problem)
        assert problem.prompt == f"{a}+{b}="
        assert problem.answer == str(a + b)
        assert 0 <= a <= 99
        assert 0 <= b <= 99
    assert fingerprint(load("arithmetic")) == (
        "6b1aff7abb4a38938c61934f71b63f926f1fa52108399da6b15c6a07e2a9c71c"
    )


def test_no_evaluation_sum_is_in_the_training_not_even_with_swapped_operands():
    pairs = {
        part: [frozenset(terms(problem)) for problem in iter_arithmetic(part)]
        for part in ("train", "eval")
    }
    assert len(pairs["train"]) == len(set(pairs["train"])) == 4050
    assert len(pairs["eval"]) == len(set(pairs["eval"])) == 1000
    assert not set(pairs["train"]) & set(pairs["eval"])
    train, held_out = load_both("arithmetic", samples=80, held_out=1000)
    assert train == load("arithmetic", samples=80)
    assert held_out == list(iter_arithmetic("eval"))


def test_each_part_has_sums_in_both_orders_and_of_all_sizes():
    for problems in (list(iter_arithmetic("train")), list(iter_arithmetic("eval"))):
        pairs = [terms(problem) for problem in problems]
        assert 0.45 < sum(1 for a, b in pairs if a > b) / len(pairs) < 0.55
        assert 96 < sum(a + b for a, b in pairs) / len(pairs) < 102


def test_the_fingerprint_is_of_the_content_and_its_order():
    a, b = Problem("a", "1", 1), Problem("b", None, 2)
    assert fingerprint([a, b]) == fingerprint([Problem("a", "1", 5), Problem("b", None, 9)])
    others = [[b, a], [a], [Problem("a", "2", 1), b], [Problem("a", "1", 1), Problem("b", "", 2)]]
    assert len({fingerprint(problems) for problems in [[a, b], *others]}) == 5


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
MESSAGE = st.fixed_dictionaries({"role": JSON | st.just("user"), "content": JSON | st.text()})
ROW = st.fixed_dictionaries(
    {},
    optional={"question": JSON, "prompt": JSON | st.lists(MESSAGE, max_size=3), "answer": JSON},
)
LINE = st.binary(max_size=40) | (JSON | ROW).map(orjson.dumps)


@pytest.fixture(scope="module")
def garbage_path(tmp_path_factory):
    return tmp_path_factory.mktemp("garbage") / "rows.jsonl"


@pytest.mark.slow
@settings(max_examples=300)
@given(
    lines=st.lists(LINE, max_size=4),
    samples=st.none() | st.integers(-1, 4),
    held_out=st.none() | st.integers(0, 2),
)
def test_any_file_gives_problems_or_a_one_line_error(garbage_path, lines, samples, held_out):
    garbage_path.write_bytes(b"\n".join(lines))
    problems, refused = [], None
    try:
        if held_out is None:
            problems = load(str(garbage_path), samples=samples)
        else:
            parts = load_both(str(garbage_path), samples=samples, held_out=held_out)
            assert len(parts[1]) == held_out
            problems = parts[0] + parts[1]
    except SpecError as error:
        refused = error
    if refused:
        assert len(str(refused).splitlines()) == 1
        assert refused.field in ("dataset", "samples", "eval_samples")
    else:
        assert samples is None or len(problems) == samples + (held_out or 0)
        assert len({orjson.dumps(p.prompt) for p in problems}) == len(problems)


@settings(max_examples=100)
@given(name=st.text(st.characters(exclude_categories=())))
def test_any_name_of_a_missing_file_is_refused_in_one_line(garbage_path, name):
    with pytest.raises(SpecError) as caught:
        load(f"{garbage_path.parent}/none/{name}")
    assert len(str(caught.value).splitlines()) == 1


def test_all_columns_of_a_row_except_its_prompt_are_kept_for_rewards(dataset):
    source = dataset(
        {"prompt": "write f", "answer": 3, "tests": ["f(1) == 2"], "level": {"of": 3}},
        {"question": "why?", "image": None},
    )
    first, second = load(source)
    assert first.columns == {"answer": 3, "tests": ["f(1) == 2"], "level": {"of": 3}}
    assert second.columns == {"question": "why?", "image": None}
    assert columns_of(p.columns for p in (first, second)) == [
        *("answer", "tests", "level"),
        *("question", "image"),
    ]


def test_another_column_changes_the_data_of_rewards_and_not_the_prompts(dataset):
    before, after = (load(dataset({"prompt": "p", "tests": tests})) for tests in ("a", "b"))
    assert fingerprint(before) == fingerprint(after)
    assert columns_fingerprint(before) != columns_fingerprint(after)
