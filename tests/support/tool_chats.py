"""Chats with tools, and the templates of all families that TRL has, on a tokenizer of bytes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(str(find_spec("trl").origin)).parent / "chat_templates"  # type: ignore[union-attr]
FAMILIES = sorted(
    path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training")
)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first one"},
                    "b": {"type": "integer", "description": "the second one"},
                },
                "required": ["a", "b"],
            },
        },
    }
]
# With arguments that end soon, whatever a model writes.
SHORT_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        **TOOLS[0]["function"],
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


def source_of(family: str) -> str:
    return (TEMPLATES / f"{family}.jinja").read_text()


def tokenizer(template: Any) -> Any:
    """One token per byte, with the special tokens that templates name."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", "<bos>", "<eos>"]
    vocabulary = {text: number for number, text in enumerate([*specials, *letters])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    made = fast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    made.chat_template = template
    return made


def call(arguments: Any, *, id: str = "abcdefghi") -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}
        ],
    }


def chat(number: int = 1, *, as_text: bool = False) -> list[dict[str, Any]]:
    """A question, a call with its result, and an answer."""
    arguments = {"a": number, "b": 2}
    return [
        {"role": "user", "content": f"What is {number}+2?"},
        call(json.dumps(arguments) if as_text else arguments),
        {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": f"{number + 2}"},
        {"role": "assistant", "content": f"It is {number + 2}."},
    ]
