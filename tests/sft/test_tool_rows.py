"""Rows with tools and template arguments give the tokens of TRL, in SFT and in DPO."""

from __future__ import annotations

import copy
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import dpo_jobs
import orjson
import pytest
import sft_jobs
import tool_chats
from breadth import mostly_slow
from datasets import Dataset
from sft_jobs import write
from tool_chats import TOOLS, source_of, tokenizer
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.sft_config import SFTConfig

from warmd.jobs.data.lengths import Lengths
from warmd.jobs.dpo import dataset as pairs
from warmd.jobs.dpo.options import DpoSpec
from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.sft import dataset as rows
from warmd.jobs.sft.kind import tokenization_of
from warmd.jobs.sft.options import SftSpec
from warmd.jobs.sft.training_templates import marks_assistant
from warmd.jobs.training.arguments import KEPT_ACTIVATIONS

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

FAMILIES = ("qwen3", "qwen2_5", "llama3_1", "gptoss", "glm4moe")
LONG = 4096


def with_inputs(row: dict[str, Any], family: str) -> dict[str, Any]:
    """A row with both columns; TRL takes tools as JSON text."""
    named = {"llama3_1": {"date_string": "1 May"}, "gptoss": {"reasoning_effort": "low"}}
    arguments = named.get(family, {"enable_thinking": False})
    given = {**row, "tools": json.dumps(TOOLS)}
    return given if family == "qwen2_5" else {**given, "chat_template_kwargs": arguments}


def chats(family: str) -> list[dict[str, Any]]:
    return [with_inputs({"messages": tool_chats.chat(n)}, family) for n in range(3)]


def prompts(family: str) -> list[dict[str, Any]]:
    """Of which the completion has a call, its result and an answer, or the call alone."""
    found = []
    for number in range(3):
        chat = tool_chats.chat(number)
        end = 4 if number else 2
        found.append(with_inputs({"prompt": chat[:1], "completion": chat[1:end]}, family))
    return found


class Warm:
    """A model of which the tokenizer counts."""

    name = "tiny"

    def __init__(self, template: str) -> None:
        self.tokenizer = tokenizer(template)
        self.model = sft_jobs.small("llama", max_position_embeddings=LONG)


def ours(folder: Path, given: list[dict[str, Any]], warm: Any, **options: Any) -> list[Any]:
    path = write(folder / "rows.jsonl", given)
    spec = SftSpec.parse({"dataset": path, "max_length": LONG, **options})
    found = spec.source.load()
    how = tokenization_of(spec, warm, found)
    return list(how.encode(found.train, Lengths(LONG)))


def theirs(folder: Path, given: list[dict[str, Any]], warm: Any, **options: Any) -> Any:
    config = SFTConfig(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        bf16=False,
        max_length=LONG,
        **KEPT_ACTIVATIONS,
        **options,
    )
    stock = sft_jobs.Stock(
        model=warm.model,
        args=config,
        processing_class=warm.tokenizer,
        train_dataset=Dataset.from_list(given),
    )
    return stock.train_dataset


def labels_of(row: dict[str, Any]) -> list[int]:
    """The tokens with a loss: some versions of TRL keep masks instead of labels."""
    if "labels" in row:
        return list(row["labels"])
    masks = [row[name] for name in ("completion_mask", "assistant_masks") if name in row]
    learned = [all(bits) for bits in zip(*masks, strict=True)] if masks else [True] * LONG
    return [token if bit else -100 for token, bit in zip(row["input_ids"], learned, strict=False)]


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, but=("qwen3", "gptoss")))
@pytest.mark.parametrize("form", [chats, prompts])
def test_sft_learns_the_tokens_of_trl(tmp_path, family, form):
    given, warm = form(family), Warm(source_of(family))
    for found, row in zip(ours(tmp_path, given, warm), theirs(tmp_path, given, warm), strict=True):
        assert (found.ids, found.stock()["labels"]) == (row["input_ids"], labels_of(row))


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, but=("qwen3", "gptoss")))
def test_the_loss_on_assistants_is_also_on_their_calls(tmp_path, family):
    given, warm = chats(family), Warm(source_of(family))
    if family == "llama3_1":
        with pytest.raises(JobFailed, match=r"^assistant_only_loss: must be false for this model"):
            ours(tmp_path, given, warm, assistant_only_loss=True)
        return
    options = {"assistant_only_loss": True}
    found = ours(tmp_path, given, warm, **options)
    for example, row in zip(found, theirs(tmp_path, given, warm, **options), strict=True):
        assert (example.ids, example.stock()["labels"]) == (row["input_ids"], labels_of(row))
        text = warm.tokenizer.decode([token for token in example.stock()["labels"] if token >= 0])
        assert "add" in text
        assert "It is" in text
        assert "What is" not in text


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, but=("qwen3", "gptoss")))
def test_dpo_learns_the_tokens_of_trl(tmp_path, family):
    given, warm = [], Warm(source_of(family))
    for number in range(3):
        question, called, *_ = tool_chats.chat(number)
        wrong = {"role": "assistant", "content": "I do not know."}
        pair = {"prompt": [question], "chosen": [called], "rejected": [wrong]}
        given.append(with_inputs(pair, family))
    path = write(tmp_path / "rows.jsonl", given)
    source = DpoSpec.parse({"dataset": path}).source
    how = pairs.Tokenization(warm.tokenizer, LONG)
    found = list(how.encode(source.load().train, Lengths(LONG)))
    stock = dpo_jobs.Stock(
        model=warm.model,
        ref_model=copy.deepcopy(warm.model),
        args=DPOConfig(
            output_dir=str(tmp_path),
            report_to=[],
            use_cpu=True,
            bf16=False,
            max_length=LONG,
            **KEPT_ACTIVATIONS,
        ),
        processing_class=warm.tokenizer,
        train_dataset=Dataset.from_list(given),
    )
    kept: Any = stock.train_dataset
    for example, row in zip(found, kept, strict=True):
        assert example.prompt == row["prompt_ids"]
        assert (example.chosen, example.rejected) == (row["chosen_ids"], row["rejected_ids"])


# Rows, apart from tokens.


def test_inputs_are_in_the_digest_of_rows_and_rows_without_them_keep_theirs(tmp_path):
    plain = [{"messages": tool_chats.chat(n)} for n in range(2)]

    def fingerprint(given: list[dict[str, Any]]) -> str:
        path = write(tmp_path / "rows.jsonl", given)
        return rows.Source(dataset=path).load().fingerprint

    variants: list[list[dict[str, Any]]] = [
        plain,
        [{**row, "tools": TOOLS} for row in plain],
        [{**row, "chat_template_kwargs": {"enable_thinking": False}} for row in plain],
        [{**row, "chat_template_kwargs": {"enable_thinking": True}} for row in plain],
    ]
    assert len({fingerprint(one) for one in variants}) == 4
    absent = [{**row, "tools": [], "chat_template_kwargs": None} for row in plain]
    assert fingerprint(absent) == fingerprint(plain)
    # As computed by 0.9, whose rows had no inputs.
    old = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    content = orjson.dumps([None, old[0]["messages"]], option=orjson.OPT_SORT_KEYS)
    assert fingerprint(old) == sha256(content + b"\nnull\n").hexdigest()


def test_openai_preferences_have_tools_in_their_input(tmp_path):
    question, called, *_ = tool_chats.chat()
    record = {
        "input": {"messages": [question], "tools": TOOLS},
        "preferred_output": [called],
        "non_preferred_output": [{"role": "assistant", "content": "?"}],
    }
    (pair,) = pairs.Source(dataset=write(tmp_path / "a.jsonl", [record])).load().train
    assert pair.inputs.tools == TOOLS
    assert pair.parts == {"tools", "tool_calls"}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"tools": TOOLS}, "line 2: tools: the chat template does not use them"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "line 2: chat_template_kwargs: the chat template has no variable enable_thinking",
        ),
    ],
)
def test_what_the_template_does_not_use_is_refused_at_submit_by_line(tmp_path, row, problem):
    chat = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    path = write(tmp_path / "rows.jsonl", [chat, {**chat, **row}])
    tokenizer(sft_jobs.TEMPLATE).save_pretrained(tmp_path / "model")
    with pytest.raises(SpecError, match=problem):
        SftSpec.parse({"dataset": path}).check_chats(tmp_path / "model")


@pytest.mark.parametrize("family", ["llama3_1", "qwen3"])
def test_a_template_without_marks_of_which_trl_has_no_variant_is_refused_at_submit(
    tmp_path, family
):
    path = write(tmp_path / "rows.jsonl", [{"messages": tool_chats.chat()}])
    tokenizer(source_of(family)).save_pretrained(tmp_path / "model")
    spec = SftSpec.parse({"dataset": path, "assistant_only_loss": True})
    if family == "qwen3":
        spec.check_chats(tmp_path / "model")
        return
    with pytest.raises(SpecError, match=r"^assistant_only_loss: must be false for this model"):
        spec.check_chats(tmp_path / "model")


@pytest.mark.parametrize("family", tool_chats.FAMILIES)
def test_variants_are_known_without_trl_as_with_it(family):
    source = source_of(family)
    try:
        found = get_training_chat_template(tokenizer(source)) is not None
    except ValueError:
        found = False
    assert marks_assistant(source) is (found or has_generation_markers(source))
