"""Rows in OpenAI's format: messages of weight 0, and `parallel_tool_calls`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sft_jobs
import tool_chats
from breadth import mostly_slow
from sft_jobs import write
from tool_chats import TOOLS, source_of

from warmd.jobs.data.lengths import Lengths
from warmd.jobs.dpo import dataset as pairs
from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.files.jsonl import Place
from warmd.jobs.models.chat_templates import ChatTemplate
from warmd.jobs.rewards.problems import problem_of
from warmd.jobs.sft.dataset import Source
from warmd.jobs.sft.kind import tokenization_of
from warmd.jobs.sft.options import SftSpec

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

LONG = 4096
SAYINGS = ("one apple", "two pears", "three plums")
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
USER = {"role": "user", "content": "1+2="}


def chat(*weights: float | None) -> list[dict[str, Any]]:
    """A chat whose assistant has the three SAYINGS with these weights."""
    found = []
    for saying, weight in zip(SAYINGS, weights, strict=True):
        given: dict[str, Any] = {} if weight is None else {"weight": weight}
        found += [{"role": "user", "content": "next?"}]
        found += [{"role": "assistant", "content": saying, **given}]
    return found


class Warm:
    """A model of which the tokenizer counts."""

    name = "tiny"

    def __init__(self, template: str) -> None:
        self.tokenizer = tool_chats.tokenizer(template)
        self.model = sft_jobs.small("llama", max_position_embeddings=LONG)


def learned(
    folder: Path, rows: list[dict[str, Any]], template: str, *, only: bool = True
) -> list[str]:
    """The text of each row that has a loss; `only`: with assistant_only_loss."""
    warm: Any = Warm(template)
    path = write(folder / "rows.jsonl", rows)
    spec = SftSpec.parse({"dataset": path, "max_length": LONG, "assistant_only_loss": only})
    found = spec.source.load()
    examples = tokenization_of(spec, warm, found).encode(found.train, Lengths(LONG))
    return [
        warm.tokenizer.decode([t for t, bit in zip(one.ids, one.learned, strict=True) if bit])
        for one in examples
    ]


@pytest.mark.parametrize(
    "family", mostly_slow(["qwen3", "qwen2_5", "gptoss", "glm4moe"], but=["qwen3"])
)
def test_messages_of_weight_0_are_read_and_not_learned(tmp_path, family):
    template = source_of(family)
    for silent in ((0,), (1,), (0, 1), (2,)):
        weights = [0 if index in silent else 1 for index in range(3)]
        as_messages = {"messages": chat(*weights)}
        as_completion = {"prompt": chat(None, None, None)[:2], "completion": chat(*weights)[2:]}
        whole, part = learned(tmp_path, [as_messages, as_completion], template)
        assert [saying in whole for saying in SAYINGS] == [weight == 1 for weight in weights]
        after = [saying in part for saying in SAYINGS[1:]]
        assert after == [weight == 1 for weight in weights[1:]]
        assert "next?" not in whole + part
        (all_else,) = learned(tmp_path, [as_messages], template, only=False)
        assert all_else.count("next?") == 3
        assert [saying in all_else for saying in SAYINGS] == [weight == 1 for weight in weights]


def test_without_a_template_that_marks_the_assistant_the_row_is_refused_at_submit(tmp_path):
    path = write(
        tmp_path / "rows.jsonl", [{"messages": chat(1, 1, 1)}, {"messages": chat(1, 0, 1)}]
    )
    spec = SftSpec.parse({"dataset": path})
    template = ChatTemplate.of(tool_chats.tokenizer(source_of("llama3_1")))
    with pytest.raises(SpecError, match="line 2: weight must be 1 for this model: its chat"):
        spec.check_template(template)


def test_a_template_that_joins_the_messages_of_the_assistant_is_refused_by_name(tmp_path):
    said = "{% generation %}{{ message.content }}{% endgeneration %}"
    template = "{% for message in messages %}" + said + "{% endfor %}"
    with pytest.raises(JobFailed, match="line 1: weight: must be 1 for this model: its chat temp"):
        learned(tmp_path, [{"messages": chat(1, 0, 1)}], template)


def test_rows_with_nothing_to_learn_are_left_out_and_other_weights_are_other_rows(tmp_path):
    template = source_of("qwen3")
    assert learned(tmp_path, [{"messages": chat(0, 0, 0)}], template) == []
    path = write(tmp_path / "rows.jsonl", [{"messages": chat(1, 1, 1)}])
    other = write(tmp_path / "other.jsonl", [{"messages": chat(1, 0, 1)}])
    same = write(tmp_path / "same.jsonl", [{"messages": chat(None, None, None)}])
    one, two, three = (Source(dataset=file).load().fingerprint for file in (path, other, same))
    assert one == three != two


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": chat(1, 0.5, 1)}, "[3]: weight: must be 1 or absent, got 0.5"),
        ({"messages": chat(1, -1, 1)}, "[3]: weight: must be 1 or absent, got -1"),
        (
            {"messages": [{**USER, "weight": 0}, {"role": "assistant", "content": "3"}]},
            "[0]: weight: must be 1 or absent, got 0",
        ),
    ],
)
def test_weights_with_another_meaning_are_refused(tmp_path, row, message):
    path = write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(SpecError) as caught:
        Source(dataset=path).load()
    assert f"line 1: messages{message}" in str(caught.value)


def calls(number: int) -> dict[str, Any]:
    made = [{**CALL, "id": str(index)} for index in range(number)]
    return {"role": "assistant", "tool_calls": made}


def sft_row(number: int, value: Any) -> dict[str, Any]:
    return {"messages": [USER, calls(number)], "tools": TOOLS, "parallel_tool_calls": value}


def dpo_row(number: int, value: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": "3"}
    return {
        "input": {"messages": [USER], "tools": TOOLS, "parallel_tool_calls": value},
        "preferred_output": [calls(number)],
        "non_preferred_output": [said],
    }


@pytest.mark.parametrize(("source", "row"), [(Source, sft_row), (pairs.Source, dpo_row)])
def test_parallel_tool_calls_say_whether_messages_may_have_several(tmp_path, source, row):
    given = [row(1, False), row(1, True), row(2, True), row(2, None)]
    assert len(list(source(dataset=write(tmp_path / "good.jsonl", given)).load().train)) == 4
    for wrong, got in ((row(2, False), "false"), (row(1, "no"), "text")):
        with pytest.raises(SpecError) as caught:
            source(dataset=write(tmp_path / "bad.jsonl", [wrong])).load()
        assert "parallel_tool_calls: must be true" in str(caught.value)
        assert str(caught.value).endswith(f", got {got}")


def test_prompts_of_grpo_may_say_it_too():
    place = Place.of_line("dataset", "rows.jsonl", 1)
    row = {"messages": [USER], "tools": TOOLS, "parallel_tool_calls": False}
    assert problem_of("{question}", row, place).prompt == [USER]
    with pytest.raises(SpecError, match="parallel_tool_calls: must be true or false, got a number"):
        problem_of("{question}", {**row, "parallel_tool_calls": 3}, place)
