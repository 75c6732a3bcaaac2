"""Bounds of how much longer the rules of a tokenizer.json can make a text.

A rule is known by its fields, not by its type alone: the library also reads rules without a type,
as early versions wrote them. It also reads an array in the place of an object, which no version
wrote: such a rule counts as endless. Imports no torch.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

_NESTED = ("normalizers", "pretokenizers", "processors", "decoders")  # the rules of a sequence
_MOST = 1e300
# Rules without a text of their own: a byte becomes two, a blank is added to each character or
# token, or special tokens are added to each side.
_BY_TYPE: Mapping[str, float] = {
    "ByteLevel": 2.0,
    "BPEDecoder": 2.0,
    "CTC": 2.0,
    "WordPiece": 2.0,
    "BertProcessing": 3.0,
    "RobertaProcessing": 3.0,
}
_WITHOUT_TYPE = 3.0


def growth(rule: Any) -> float:
    """Return how many times as long a rule, with those in it, can make a text, at most.

    Lengths are in bytes, those of post-processors in tokens.
    """
    if rule is None:
        return 1.0
    if not isinstance(rule, dict):
        return _MOST
    kind = rule.get("type")
    factors = [_BY_TYPE.get(kind, 1.0) if isinstance(kind, str) else _WITHOUT_TYPE]
    factors += [growth(one) for name in _NESTED for one in _list(rule.get(name))]
    if "pattern" in rule:
        factors.append(_replaced(rule))
    for name in ("prepend", "replacement"):  # the second one of Metaspace, which may prepend it
        factors.append(1.0 + _num_bytes(rule.get(name)))
    if "precompiled_charsmap" in rule:
        factors.append(_longest_mapped(rule["precompiled_charsmap"]))
    if "single" in rule or "pair" in rule:
        factors.append(max(_num_tokens(rule, "single"), _num_tokens(rule, "pair")))
    return _product(factors)


def _replaced(rule: Mapping[str, Any]) -> float:
    content, pattern = _num_bytes(rule.get("content")), rule["pattern"]
    replaced = _num_bytes(pattern.get("String")) if isinstance(pattern, dict) else 0
    # An expression, or an empty text, may be found between any two characters.
    return max(1.0, content / replaced) if replaced else 1.0 + content


def _longest_mapped(charsmap: Any) -> float:
    """Return the bytes of the longest text that a map of SentencePiece puts for a character.

    The map has the size of a trie, the trie, and the texts, each with a NUL after it.
    """
    try:
        content = base64.b64decode(charsmap, validate=True)
    except (TypeError, ValueError):  # the library refuses it
        return 1.0
    trie = int.from_bytes(content[:4], "little")
    return float(max(1, *map(len, content[4 + trie // 4 * 4 :].split(b"\0"))))


def _num_tokens(rule: Mapping[str, Any], name: str) -> float:
    """Return the tokens of a template for texts of one token."""
    known: Any = rule.get("special_tokens")
    count = 0.0
    for item in _list(rule.get(name)):
        if not isinstance(item, dict):
            return _MOST
        if "SpecialToken" not in item:  # a text
            count += 1
            continue
        try:
            count += len(known[item["SpecialToken"]["id"]]["ids"])
        except (KeyError, TypeError):
            return _MOST
    return max(1.0, count)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _num_bytes(text: Any) -> int:
    return len(text.encode(errors="replace")) if isinstance(text, str) else 0


def _product(factors: Iterable[float]) -> float:
    whole = 1.0
    for factor in factors:
        whole = min(whole * factor, _MOST)
    return whole
