"""`warmd data`: the content of a data set, its use by each kind, and the cached tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import tiny
import tool_chats
from odd_tokenizers import merging
from shell import Done, warmd

from warmd.jobs.data.corpus import FOLDER

GOOD = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(5)]


class Desk:
    """A folder with data, in which `warmd` is typed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"

    def write(self, name: str, rows: list[dict[str, Any]]) -> None:
        (self.folder / name).write_bytes(b"\n".join(map(orjson.dumps, rows)))

    def warmd(self, *arguments: str) -> Done:
        return warmd("data", *arguments, home=self.home, folder=self.folder)

    def shown(self, *arguments: str) -> dict[str, Any]:
        done = self.warmd("show", *arguments, "--json")
        assert (done.code, done.err) == (0, "")
        return done.objects[0]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_rows_columns_and_use_by_each_kind_are_shown(desk):
    desk.write("rows.jsonl", [*GOOD, {"question": "none"}, {"text": "a text"}])
    found = desk.shown("rows.jsonl")
    assert (found["rows"], found["files"]) == (7, 1)
    assert found["columns"] == {
        "question": {"text": 6},
        "answer": {"text": 5},
        "text": {"text": 1},
    }
    uses = {
        kind: (use["usable"], use["bad"], sorted(use["fields"]))
        for kind, use in found["kinds"].items()
    }
    assert uses["grpo"] == (5, 2, ["answer", "question"])
    assert uses["sft"] == (6, 1, ["answer", "question", "text"])
    assert uses["dpo"] == (0, 7, [])
    assert uses["mlm"] == (1, 6, ["text"])
    assert "line 6: must be an object with an answer" in found["kinds"]["sft"]["first_fault"]
    assert found["examples"] == GOOD


def test_lengths_are_tokens_of_the_model_and_rows_over_the_limit_are_counted(desk):
    tiny.tokenizer().save_pretrained(desk.folder / "model")
    (desk.folder / "model/config.json").write_text('{"max_position_embeddings": 20}')
    desk.write("rows.jsonl", [{"prompt": "1+1=", "completion": "2" * n} for n in (1, 30, 40)])
    sft = desk.shown("rows.jsonl", "--model", "model")["kinds"]["sft"]
    assert (sft["longest"], sft["max_length"], sft["truncated"]) == (44, 20, 2)
    assert sft["histogram"] == {"<=32": 1, "<=64": 2}
    in_characters = desk.shown("rows.jsonl")
    assert in_characters["unit"] == "characters"
    assert in_characters["kinds"]["sft"]["max_length"] is None


@pytest.mark.slow
def test_prompts_that_do_not_end_on_a_token_boundary_are_counted(desk):
    merging().save_pretrained(desk.folder / "model")
    (desk.folder / "model/config.json").write_text('{"max_position_embeddings": 20}')
    sides = [{"completion": "ca"}, {"chosen": "ba", "rejected": "ca"}, {"completion": "ba"}]
    desk.write("rows.jsonl", [{"prompt": "ab ", **side} for side in sides])
    kinds = desk.shown("rows.jsonl", "--model", "model")["kinds"]
    assert kinds["grpo"]["warning"] is None
    for kind, counted in (("sft", "in 1 of 2 records"), ("dpo", "in 1 of 1 records")):
        assert counted in kinds[kind]["warning"]
        assert "from ' ' on" in kinds[kind]["warning"]
    said = desk.warmd("show", "rows.jsonl", "--model", "model").out
    assert "sft: dataset: the prompt alone has other tokens" in said
    assert desk.shown("rows.jsonl")["kinds"]["sft"]["warning"] is None  # in characters


def test_columns_make_a_data_set_usable(desk):
    (desk.folder / "rows.csv").write_text('problem,solution\n1+1?,"####\n2"\n')
    assert desk.shown("rows.csv")["kinds"]["sft"]["usable"] == 0
    mapped = desk.shown("rows.csv", "--columns", "question=problem,answer=solution")
    assert mapped["kinds"]["sft"]["usable"] == mapped["kinds"]["grpo"]["usable"] == 1


def test_the_text_has_tables_histograms_and_five_examples(desk):
    desk.write("rows.jsonl", [*GOOD, {"question": "sixth", "answer": "7"}])
    out = desk.warmd("show", "rows.jsonl").out
    assert f"{desk.folder / 'rows.jsonl'}: 6 rows, " in out
    assert "rows by characters (sft)" in out
    assert "row 5\n" in out
    assert "sixth" not in out
    assert "mlm: first bad row: dataset: " in out


def test_bad_records_are_counted_and_a_missing_data_set_is_one_line(desk):
    (desk.folder / "rows.jsonl").write_bytes(b'{"text": "a"}\n{broken\n')
    found = desk.shown("rows.jsonl")
    assert {use["bad"] for use in found["kinds"].values()} >= {1}
    assert "error" in found["examples"][1]
    assert desk.warmd("show", "nowhere.csv").is_refusal(2)
    assert desk.warmd("show", "rows.jsonl", "--model", "nope").is_refusal(2)
    assert desk.warmd("show", "rows.jsonl", "--columns", "x").is_refusal(2)


def test_clear_removes_cached_tokens(desk):
    kept = desk.home / "cache" / FOLDER / "0123"
    kept.mkdir(parents=True)
    (kept / "ids.bin").write_bytes(b"x" * 1000)
    assert desk.warmd("clear").err == "freed 1 kB\n"
    assert not kept.exists()
    assert desk.warmd("clear").err == "nothing to remove\n"


def test_tools_and_template_arguments_are_read_and_counted(desk, tmp_path):
    tokenizer = tool_chats.tokenizer(tool_chats.source_of("qwen3"))
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    chat, tools = tool_chats.chat(), tool_chats.TOOLS
    desk.write("rows.jsonl", [{"messages": chat, "tools": tools}])
    use = desk.shown("rows.jsonl", "--model", str(tmp_path / "model"))["kinds"]["sft"]
    assert (use["usable"], use["fields"]) == (1, ["messages", "tools"])
    rendered = tokenizer.apply_chat_template(
        chat, tools=tools, add_generation_prompt=True, tokenize=False
    )
    assert use["longest"] == len(tokenizer(rendered)["input_ids"])
    desk.write("rows.jsonl", [{"messages": chat, "chat_template_kwargs": {"thinkin": False}}])
    use = desk.shown("rows.jsonl", "--model", str(tmp_path / "model"))["kinds"]["sft"]
    assert use["bad"] == 1
    assert "chat_template_kwargs: the chat template has no variable thinkin" in use["first_fault"]
