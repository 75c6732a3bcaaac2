"""Tokenizer files of a model, read without transformers, whose import takes seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

_MOST_S = 1.0  # for counting the tokens of prompts
_MOST_CHARACTERS = 100_000  # of one that are looked at


class TokenizerFolder:
    """The files of a tokenizer, and the config.json of its model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def positions(self) -> int | None:
        """Return the context length in tokens; None when the config does not name it."""
        config = self._read("config.json")
        limit = config.get("text_config", config).get("max_position_embeddings")
        return limit if isinstance(limit, int) else None

    def lacks_chat_template(self) -> bool:
        """Whether there is a tokenizer config but no chat template."""
        files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
        config = self._read("tokenizer_config.json")
        is_there = any((self._folder / name).exists() for name in files)
        return bool(config) and not config.get("chat_template") and not is_there

    def longer_than(self, room: int, texts: Iterable[tuple[int, str]]) -> tuple[int, str] | None:
        """Return the row and the tokens of the first text of more than `room`, None for none.

        None also where there is no tokenizer.json. Special tokens are not counted: what is said of
        a text here is true whatever the tokenizer adds.
        """
        # A text has at most as many tokens as bytes, so few candidates remain.
        candidates = [(row, text) for row, text in texts if len(text.encode()) > room]
        path = self._folder / "tokenizer.json"
        if not candidates or not path.is_file():
            return None
        from tokenizers import Tokenizer

        deadline = time.monotonic() + _MOST_S
        try:
            tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception:  # whatever that library raises, the job will say so
            return None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        for row, text in candidates:
            begin = text[:_MOST_CHARACTERS]
            num_tokens = len(tokenizer.encode(begin, add_special_tokens=False).ids)
            is_whole = begin == text
            surely = num_tokens if is_whole else num_tokens - 1  # the cut may have split one
            if surely > room:
                return row, f"{surely}" if is_whole else f"at least {surely}"
            if time.monotonic() > deadline:
                break
        return None

    def _read(self, name: str) -> dict[str, Any]:
        try:
            found = orjson.loads((self._folder / name).read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return {}
        return found if isinstance(found, dict) else {}
