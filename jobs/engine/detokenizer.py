"""The detokenizer of all completions: answers, evaluations, rewards and logs have the same texts.

It is incremental: it emits complete UTF-8 characters only, and no part of a stop string.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

_CONTEXT = 5  # minimum tokens of context, so that a token's leading space is decoded
_WINDOW = 3 * _CONTEXT  # maximum tokens that are decoded again for each new token
_CHARACTER = 4  # bytes of a UTF-8 character at most, and so tokens that it may take
_INCOMPLETE = "\ufffd"  # what an incomplete character decodes to


def text_of(
    tokenizer: Any, prompt: Sequence[int], completion: Sequence[int], ends: Container[int] = ()
) -> str:
    """Return the text of a whole completion of `prompt`: what a TextStream returns piece by piece.

    The text begins with its space, an incomplete character at its end is dropped, and a last token
    among `ends` has no text.
    """
    if completion and completion[-1] in ends:
        completion = completion[:-1]
    stream = TextStream(tokenizer, prompt, ())
    return "".join(map(stream.add, completion)) + stream.finish()


class TextStream:
    """The text of one completion. `add` returns the text that later tokens cannot change."""

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stop: tuple[str, ...],
        *,
        keeps_special: bool = False,
    ) -> None:
        """`keeps_special`: whether special tokens have a text."""
        self._tokenizer = tokenizer
        self._skips_special = not keeps_special
        self._ids = list(prompt[1 - _CONTEXT - _CHARACTER :])
        self._read = len(self._ids)  # tokens whose text was returned or held back
        self._begin, self._before = 0, ""  # first token of the context, and the text from it on
        self._move_context()
        self._stop = stop
        self._held = ""  # held back: may be the start of a stop string
        self.is_stopped = False
        self.num_bytes = 0  # UTF-8 bytes decoded, also of text that is held back or cut

    def add(self, token: int) -> str:
        """Append a token and return new text; sets `is_stopped` at a complete stop string."""
        self._ids.append(token)
        return self._release(self._take(len(self._ids) - self._read < _CHARACTER))

    @property
    def is_waiting(self) -> bool:
        """Whether the text of the last tokens depends on the next one."""
        return self._read < len(self._ids)

    def finish(self) -> str:
        """Return the text that was held back, without an incomplete character."""
        if self.is_stopped:
            return ""
        rest = self._held + self._take(False).rstrip(_INCOMPLETE)
        self._held = ""
        for text in self._stop:
            rest = rest.partition(text)[0]
        return rest

    def _take(self, may_wait: bool) -> str:
        before, after = self._before, self._decode(self._ids[self._begin :])
        if may_wait and after.endswith(_INCOMPLETE):
            return ""
        if len(after) <= len(before):
            return ""
        self._read, self._before = len(self._ids), after
        if self._read - self._begin > _WINDOW:
            self._move_context()
        self.num_bytes += len(after[len(before) :].encode())
        return after[len(before) :]

    def _move_context(self) -> None:
        """Let the context be a few of the last tokens that were read.

        It begins with a whole character: the bytes after a part of one may have no text either.
        """
        latest = max(self._read - _CONTEXT, 0)
        for begin in range(latest, max(latest - _CHARACTER, -1), -1):
            text = self._decode(self._ids[begin : self._read])
            if begin == latest or not text.startswith(_INCOMPLETE):
                self._begin, self._before = begin, text
            if not text.startswith(_INCOMPLETE):
                return

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=self._skips_special, clean_up_tokenization_spaces=False
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
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
