"""From tokens to text as it grows: no half characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CONTEXT = 5  # tokens before the text, so that what they imply (a leading space) is seen
_CHARACTER = 4  # bytes that a character has at most, and so tokens that it may take
_HALF = "\ufffd"  # what half a character decodes to


class TextStream:
    """The text of one completion. `add` returns what is certain by now."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._begin = 0  # of the tokens whose text is context
        self._read = len(self._ids)  # tokens whose text was taken
        self._stop = stop
        self._held = ""  # may be the beginning of a stop string
        self.is_stopped = False

    def add(self, token: int) -> str:
        """Take one more token; sets `is_stopped` when a stop string is whole."""
        self._ids.append(token)
        return self._release(self._take(len(self._ids) - self._read < _CHARACTER))

    def finish(self) -> str:
        """Return what was held back; half a character is dropped."""
        if self.is_stopped:
            return ""
        rest = self._held + self._take(False).rstrip(_HALF)
        self._held = ""
        for text in self._stop:
            rest = rest.partition(text)[0]
        return rest

    def _take(self, may_wait: bool) -> str:
        before = self._decode(self._ids[self._begin : self._read])
        after = self._decode(self._ids[self._begin :])
        if may_wait and after.endswith(_HALF):
            return ""
        if len(after) <= len(before):
            return ""
        self._begin, self._read = self._read, len(self._ids)
        # Long enough a context for the next token, also where this one has no text of its own.
        self._begin = min(self._begin, max(0, self._read - _CONTEXT))
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _release(self, text: str) -> str:
        if not self._stop:
            return text
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.is_stopped = True
            self._held = ""
            return text[: min(found)]
        held = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
