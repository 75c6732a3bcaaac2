"""Bounds of the growth of texts: at least what the library does, and no more than models need."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from warmd.jobs.models.folder_checks import _check_growth
from warmd.jobs.models.folder_files import BadFile
from warmd.jobs.models.tokenizer_growth import growth

LONG = "x" * 5000
A: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
B: dict[str, Any] = {"Sequence": {"id": "B", "type_id": 0}}
MANY = {"id": "m", "ids": [1] * 5000, "tokens": ["?"] * 5000}


def special(name: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": name, "type_id": 0}}


def template(single: list[Any], pair: list[Any] | None = None, **known: Any) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair or [],
        "special_tokens": {
            name: {"id": name, "ids": [1], "tokens": ["?"]} for name in ("<s>", "</s>")
        }
        | known,
    }


def sequence(key: str, *rules: Any) -> dict[str, Any]:
    return {"type": "Sequence", key: list(rules)}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(text: str) -> str:
    return base64.b64encode(b"\4\0\0\0" + b"\0" * 4 + text.encode() + b"\0").decode()


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TENFOLD = replace({"String": "a"}, "a" * 10)

HOSTILE: dict[str, tuple[str, Any]] = {
    "prepend": ("normalizer", {"type": "Prepend", "prepend": LONG}),
    "prepend without type": ("normalizer", {"prepend": LONG}),
    "prepend with other fields": (
        "normalizer",
        {"type": "Prepend", "prepend": LONG, "normalizers": [{"type": "NFC"}]},
    ),
    "sequence without type": ("normalizer", {"normalizers": [{"prepend": LONG}]}),
    "prepend many times": (
        "normalizer",
        sequence("normalizers", *[{"type": "Prepend", "prepend": "x" * 50}] * 100),
    ),
    "replace": ("normalizer", replace({"String": "a"}, LONG)),
    "replace by expression": ("normalizer", replace({"Regex": "a|b"}, LONG)),
    "replace many times": ("normalizer", sequence("normalizers", *[TENFOLD] * 4)),
    "nested": (
        "normalizer",
        sequence("normalizers", *[sequence("normalizers", *[TENFOLD] * 2)] * 2),
    ),
    "bytes of bytes": ("pre_tokenizer", sequence("pretokenizers", *[BYTES] * 12)),
    "template": ("post_processor", template([A] * 5000)),
    "template for two": ("post_processor", template([A], [A, B] * 5000)),
    "long special token": ("post_processor", template([special("m"), A], m=MANY)),
    "arrays for pieces": ("post_processor", template([{"Sequence": ["A", 0]}] * 5000)),
    "arrays for special tokens": (
        "post_processor",
        template([{"SpecialToken": ["m", 0]}, A], m=MANY),
    ),
    "arrays for their tokens": (
        "post_processor",
        template([special("m"), A], m=["m", MANY["ids"], MANY["tokens"]]),
    ),
    "arrays for rules": (
        "post_processor",
        sequence("processors", [[A] * 5000, [A], {}]),
    ),
    "special tokens in a sequence": (
        "post_processor",
        sequence("processors", *[template([special("<s>"), A, special("</s>")])] * 3),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_rules_that_lengthen_a_text_too_far_are_refused(name):
    part, rule = HOSTILE[name]
    tokenizer = Tokenizer.from_str(json.dumps(rules_with(part, rule)))
    assert tokenizer is not None  # the library reads them
    with pytest.raises(BadFile, match=rf"{part} must be rules that make a text at most"):
        _check_growth({part: rule})


def test_the_growth_of_normalizer_and_pre_tokenizer_multiplies():
    normalizer = sequence("normalizers", *[TENFOLD] * 3)
    _check_growth({"normalizer": normalizer})
    with pytest.raises(BadFile, match=r"normalizer must be rules .* got 2e\+03 times"):
        _check_growth({"normalizer": normalizer, "pre_tokenizer": BYTES})


def test_a_character_may_be_mapped_to_a_long_text():
    assert growth({"type": "Precompiled", "precompiled_charsmap": charsmap("x" * 2000)}) == 2000
    assert growth({"type": "Precompiled", "precompiled_charsmap": charsmap("")}) == 1
    assert growth({"type": "Precompiled", "precompiled_charsmap": "no base64"}) == 1


BOS, EOS = special("<s>"), special("</s>")
LLAMA_2 = sequence(
    "normalizers", {"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁")
)
LONGEST_NFKC = "صلى الله عليه وسلم"  # of one character, in SentencePiece's map
USUAL: dict[str, dict[str, Any]] = {
    "Llama 2, Gemma": {
        "normalizer": LLAMA_2,
        "post_processor": template([BOS, A], [BOS, A, BOS, B]),
    },
    "Llama 3": {
        "pre_tokenizer": sequence("pretokenizers", {"type": "Split"}, BYTES),
        "post_processor": sequence("processors", BYTES, template([BOS, A], [BOS, A, BOS, B])),
        "decoder": BYTES,
    },
    "Qwen, GPT-2": {"normalizer": {"type": "NFC"}, "pre_tokenizer": BYTES, "post_processor": BYTES},
    "BERT": {
        "normalizer": {"type": "BertNormalizer", "handle_chinese_chars": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": template([BOS, A, EOS], [BOS, A, EOS, B, EOS]),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    },
    "RoBERTa": {
        "pre_tokenizer": BYTES,
        "post_processor": {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0]},
    },
    "T5, XLM-RoBERTa": {
        "normalizer": sequence(
            "normalizers",
            {"type": "Precompiled", "precompiled_charsmap": charsmap(LONGEST_NFKC)},
            replace({"Regex": " {2,}"}, "▁"),
        ),
        "pre_tokenizer": sequence("pretokenizers", {"type": "WhitespaceSplit"}, METASPACE),
        "post_processor": template([BOS, A, EOS], [BOS, A, EOS, EOS, B, EOS]),
        "decoder": METASPACE,
    },
    "Whisper": {"post_processor": template([BOS] * 4 + [A, EOS], [BOS] * 4 + [A, B, EOS])},
}


@pytest.mark.parametrize("name", USUAL)
def test_rules_of_widespread_tokenizers_are_taken(name):
    _check_growth(USUAL[name])


def rules_with(part: str, rule: Any) -> dict[str, Any]:
    return {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"},
        part: rule,
    }
