"""Tokenizers whose rules have unusual regular expressions: tried within limits first.

A regular expression in a tokenizer.json, such as `(a+)+$`, can take hours for a short text, and no
other thread of the process runs meanwhile. Its rules are tried in a process of their own
(tokenizer_rules.py), without the vocabulary. Usual expressions need time in proportion to the text,
and cost nothing here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ..errors import JobFailed
from ..user_code.child_server import MEMORY_BYTES
from ..user_code.limited_processes import LimitedProcesses

LIMIT_S = 0.8  # processor time for a part of a text, which takes milliseconds
_WAIT_S = 20.0  # for that, on a busy machine
_PART = 200_000  # characters that are tried at once

_processes = LimitedProcesses(f"{__package__}.tokenizer_rules", shows_output=False)

# Alternatives of characters and classes, each once, of which the last may be repeated.
_ATOM = r"(?:\\[pP]\{\w+\}|\\.|\[(?:\\.|[^\[\]\\])+\]|[^\\()\[\]{}*+?|])"
_RUN = rf"(?:{_ATOM})*(?:[+*]|\{{\d{{1,2}}(?:,\d{{0,2}})?\}})?"
_IS_SIMPLE = re.compile(rf"{_RUN}(?:\|{_RUN})*", re.DOTALL)
_CASED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# The expressions of widespread tokenizers: GPT-2; Qwen 2; Llama 3; Qwen 3.5; o200k.
_USUAL = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    rf"{_CASED}|{_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    rf"{_CASED}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    rf"{_CASED}|{_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    rf"{_WORD}[{_UPPER}]*[{_LOWER}]+{_CASED}?|{_WORD}[{_UPPER}]+[{_LOWER}]*{_CASED}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
}


def is_usual(expression: str) -> bool:
    """Whether a regular expression is known to need time in proportion to the text."""
    return expression in _USUAL or _IS_SIMPLE.fullmatch(expression) is not None


def expressions(part: Any) -> Iterator[str]:
    """Yield the regular expressions in a part of a tokenizer.json."""
    if isinstance(part, dict):
        if isinstance(part.get("Regex"), str):
            yield part["Regex"]
        part = list(part.values())
    for one in part if isinstance(part, list) else ():
        yield from expressions(one)


def rules_of(core: Any) -> str | None:
    """Return the rules of a tokenizer of the library tokenizers that must be tried; None: usual.

    They are a tokenizer.json with one token.
    """
    parts = {
        name: None if (one := getattr(core, name)) is None else json.loads(one.__getstate__())
        for name in ("normalizer", "pre_tokenizer")
    }
    if all(map(is_usual, expressions(parts))):
        return None
    added = [
        {"id": number, **token.__getstate__()}
        for number, token in core.get_added_tokens_decoder().items()
    ]
    model = {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}
    return json.dumps({"version": "1.0", "added_tokens": added, **parts, "model": model})


def try_rules(rules: str, text: str, name: str) -> None:
    """Raise JobFailed if these rules of a tokenizer take too long, or too much memory, for a text.

    `name`: of the tokenizer, for the message.
    """
    for start in range(0, max(1, len(text)), _PART):
        request = {"rules": rules, "text": text[start : start + _PART]}
        try:
            problem = _processes.answer(request, _WAIT_S, processor_s=LIMIT_S).get("error")
        except TimeoutError:
            problem = f"they take more than {LIMIT_S:g} s of a processor"
        except EOFError:
            problem = f"they need more than {MEMORY_BYTES >> 20} MiB"
        if problem is not None:
            raise JobFailed(
                f"tokenizer: the rules of {name} must split {text[:40]!r} in time, but {problem}"
            )


def guarded(tokenizer: Any) -> Any:
    """Return a tokenizer of transformers that tries its rules first, unless they are usual."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    rules = None if core is None else rules_of(core)
    if rules is None:
        return tokenizer
    own = type(tokenizer)

    def call(self: Any, text: Any = None, *args: Any, **how: Any) -> Any:
        given = [text, *args[:1], how.get("text_pair")]
        for one in _texts(given):
            try_rules(rules, one, str(self.name_or_path))
        return own.__call__(self, text, *args, **how)

    # A class of the same name, as transformers saves the name.
    tokenizer.__class__ = type(own.__name__, (own,), {"__call__": call})
    return tokenizer


def _texts(given: Any) -> Iterator[str]:
    if isinstance(given, str):
        yield given
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _texts(one)
