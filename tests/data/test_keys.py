"""Keys of a record with a meaning that warmd does not support are refused by every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from warmd.jobs.data.keys import READ
from warmd.jobs.dpo.dataset import Source as Pairs
from warmd.jobs.errors import SpecError
from warmd.jobs.eval.options import EvalSpec
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.infer import batch_file
from warmd.jobs.sft.dataset import Source as Rows

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
OPENAI = {
    "input": {"messages": CHAT[:1]},
    "preferred_output": CHAT[1:],
    "non_preferred_output": [{"role": "assistant", "content": "c"}],
}


def evaluated(path: str) -> Any:
    return EvalSpec.parse({"dataset": path, "reward": ["math"]}).questions()


def choices(path: str) -> Any:
    return EvalSpec.parse({"dataset": path, "task": "choice"}).questions()


def problems_of(path: str) -> Any:
    given = {"dataset": path, "reward": ["math"], "samples": "all", "eval_samples": 0}
    return GrpoSpec.parse({**given, "prompts_per_step": 1}).parts.training


def prompts(path: str) -> Any:
    return list(batch_file.read(Path(path)))


READERS: list[Any] = [
    pytest.param(lambda path: Rows(dataset=path).load(), {"messages": CHAT}, id="sft-chat"),
    pytest.param(lambda p: Rows(dataset=p).load(), {"prompt": "a", "completion": "b"}, id="sft"),
    pytest.param(lambda path: Pairs(dataset=path).load(), PAIR, id="dpo"),
    pytest.param(lambda path: Pairs(dataset=path).load(), OPENAI, id="dpo-openai"),
    pytest.param(problems_of, {"question": "a", "answer": "1"}, id="grpo"),
    pytest.param(problems_of, {"prompt": CHAT[:1]}, id="grpo-chat"),
    pytest.param(evaluated, {"question": "a", "answer": "1"}, id="eval"),
    pytest.param(choices, {"question": "a", "choices": ["a", "b"], "answer": 0}, id="choice"),
    pytest.param(prompts, {"messages": CHAT[:1]}, id="infer"),
]
CHATS = [one for one in READERS if "role" in str(one.values[1])]
MEANINGFUL = {
    "functions": [{"name": "add"}],
    "tool_calls": [{"id": "1"}],
    "images": ["a.png"],
}
OF_CHATS = {
    "tools": [{"type": "function", "function": {"name": "add"}}],
    "chat_template_kwargs": {"enable_thinking": False},
}


def write(folder: Path, *rows: Any) -> str:
    (folder / "rows.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return str(folder / "rows.jsonl")


@pytest.mark.parametrize(("read", "row"), READERS)
@pytest.mark.parametrize("name", MEANINGFUL)
def test_a_key_that_would_change_the_prompt_is_refused_by_name_and_line(tmp_path, read, row, name):
    path = write(tmp_path, row, {**row, name: MEANINGFUL[name]})
    with pytest.raises(SpecError, match=rf"rows\.jsonl, line 2: {name}: must be absent or empty"):
        read(path)


def test_whether_calls_may_be_parallel_is_not_asked_of_prompts_to_continue(tmp_path):
    path = write(tmp_path, {"messages": CHAT[:1], "parallel_tool_calls": False})
    with pytest.raises(SpecError, match=r"line 1: parallel_tool_calls: must be absent or empty"):
        prompts(path)


TEXTS = [one for one in READERS if one not in CHATS]


@pytest.mark.parametrize(("read", "row"), TEXTS)
@pytest.mark.parametrize("value", [False, True])
def test_a_text_does_not_say_whether_calls_may_be_parallel(tmp_path, read, row, value):
    path = write(tmp_path, row, {**row, "parallel_tool_calls": value})
    problem = r"rows\.jsonl, line 2: parallel_tool_calls: must be absent"
    with pytest.raises(SpecError, match=problem):
        read(path)


@pytest.mark.parametrize(
    ("read", "row"), [*TEXTS, pytest.param(prompts, {"prompt": "a"}, id="infer-text")]
)
@pytest.mark.parametrize("name", OF_CHATS)
def test_a_text_has_no_inputs_of_a_chat_template(tmp_path, read, row, name):
    path = write(tmp_path, row, {**row, name: OF_CHATS[name]})
    problem = rf"rows\.jsonl, line 2: {name}: must be absent for a text"
    with pytest.raises(SpecError, match=problem):
        read(path)


@pytest.mark.parametrize(("read", "row"), CHATS)
def test_a_chat_has_inputs_of_its_template_or_json_texts_of_them(tmp_path, read, row):
    texts = {name: orjson.dumps(value).decode() for name, value in OF_CHATS.items()}
    assert read(write(tmp_path, {**row, **OF_CHATS}, {**row, **texts}))


@pytest.mark.parametrize(("read", "row"), READERS)
def test_null_and_empty_are_absent(tmp_path, read, row):
    assert read(write(tmp_path, {**row, "tools": [], "images": None, "chat_template_kwargs": {}}))


@pytest.mark.parametrize(("read", "row"), CHATS)
@pytest.mark.parametrize("role", ["human", "User", "", 3])
def test_a_role_that_no_template_knows_is_refused(tmp_path, read, row, role):
    changed = orjson.loads(orjson.dumps(row).replace(b'"user"', orjson.dumps(role)))
    with pytest.raises(SpecError, match=r"role"):
        read(write(tmp_path, changed))


@pytest.mark.parametrize(
    ("kind", "source", "row"),
    [
        ("sft", Rows, {"prompt": "a", "completion": "b"}),
        ("dpo", Pairs, PAIR),
    ],
)
def test_keys_that_a_kind_does_not_read_are_counted_and_named(tmp_path, kind, source, row):
    path = write(tmp_path, {**row, "id": 1}, {**row, "id": 2, "url": "u"})
    assert row.keys() <= READ[kind]
    assert source(dataset=path).load().reading.ignored == {"id": 2, "url": 1}


def test_blank_lines_are_skipped_by_every_reader_and_count_as_lines(tmp_path):
    for read, row in ((one.values[0], one.values[1]) for one in READERS):
        path = Path(write(tmp_path, row))
        path.write_bytes(b"\n  \r\n" + path.read_bytes() + b"\n\t\n")
        assert read(str(path))
        path.write_bytes(path.read_bytes() + b"5\n")
        with pytest.raises(SpecError, match=r"rows\.jsonl, line 6: must be a JSON object"):
            read(str(path))
