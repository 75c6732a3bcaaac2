"""The texts and bytes of single tokens, for log-probabilities, with any type of tokenizer.

The texts of a completion's tokens, joined, are its text, unless a character takes several tokens:
then each of them has the text U+FFFD, and its own part of the bytes. A token that ends a completion
is no part of its text and has none, whether its tokenizer calls it special or not. Tokens of a stop
string, and of an incomplete character at the end, have no entry; a token that is cut has what is
left of its text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache, cached_property
from typing import Any

from ..engine.request import TokenLogprob

_INCOMPLETE = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte's token of SentencePiece


class TokenTexts:
    """The texts of a tokenizer's tokens. `ends`: tokens that end a completion."""

    def __init__(self, tokenizer: Any, ends: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._known: dict[int, tuple[str, list[int]]] = {}

    def entries(
        self, found: Sequence[TokenLogprob], kept_bytes: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the entries of a completion's tokens; `kept_bytes` as in engine.request.Piece."""
        if kept_bytes is None:
            return [self.entry(one) for one in found]
        entries = []
        for one in found:
            if kept_bytes <= 0:
                break
            entries.append(self.entry(one, kept_bytes=kept_bytes))
            kept_bytes -= len(entries[-1]["bytes"])
        return entries

    def entry(
        self,
        found: TokenLogprob,
        *,
        kept_bytes: int | None = None,
        is_prompt: bool = False,
        is_first: bool = False,
    ) -> dict[str, Any]:
        """Return a log-probability as plain values, with texts.

        An alternative whose text is empty or that of another one has a `name` that none of them
        shares. `kept_bytes`: the token's text is cut to this many bytes. `is_prompt`: a token of a
        prompt; `is_first`: the first one, which has no log-probability.
        """
        text, data = self._of(found.token, is_prompt)
        if kept_bytes is not None and kept_bytes < len(data):
            data = data[:kept_bytes]
            text = bytes(data).decode(errors="replace")
        top, taken = [], {text}
        for token, logprob in found.top:
            is_chosen = token == found.token
            of_token, bytes_of_token = (text, data) if is_chosen else self._of(token, is_prompt)
            top.append({"token": of_token, "bytes": bytes_of_token, "logprob": logprob})
            if not is_chosen:
                name = self._name(token, of_token, taken)
                taken.add(name)
                if name != of_token:
                    top[-1]["name"] = name
        return {
            "token": text,
            "bytes": data,
            "logprob": None if is_first else found.logprob,
            "top": None if is_first else top,
        }

    def joined(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self._decode(list(tokens))

    def _name(self, token: int, text: str, taken: Collection[str]) -> str:
        """Return the text of a token, or else its piece, or else that with its number."""
        if text and text not in taken:
            return text
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        return piece if piece not in taken else f"{piece} ({token})"

    def _of(self, token: int, is_prompt: bool) -> tuple[str, list[int]]:
        """Return the text of a token and its bytes; both are empty for a special token.

        Also for the end of a completion: its text, if its tokenizer has one, is not in the answer.
        """
        if token in self._ends and not is_prompt:
            return "", []
        found = self._known.get(token)
        if found is None:
            text = self._decode([*self._context, token])[len(self._context_text) :]
            found = self._known[token] = (text, list(self._bytes(token, text)))
        return found

    def _bytes(self, token: int, text: str) -> bytes:
        if _INCOMPLETE not in text:
            return text.encode()
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        values = [_byte_of().get(character) for character in piece]
        return bytes(v for v in values if v is not None) if None not in values else text.encode()

    @cached_property
    def _context(self) -> list[int]:
        """A token before the one that is decoded: many tokenizers drop a leading blank."""
        ids: list[int] = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        return ids

    @cached_property
    def _context_text(self) -> str:
        return self._decode(self._context)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


@cache
def _byte_of() -> dict[str, int]:
    """Return the bytes by the characters that stand for them in a byte-level BPE vocabulary.

    As `bytes_to_unicode` of GPT-2: printable characters stand for themselves, all others are
    shifted behind U+0100.
    """
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in kept]
    shifted = {chr(256 + place): value for place, value in enumerate(others)}
    return {chr(value): value for value in kept} | shifted
