"""One completion on its way through the engine."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from .detokenizer import TextStream
from .image_encoding import Sight
from .request import Generation, Piece
from .sampling import Sampler


class Choice:
    """A sequence: the prompt and the completion behind it, which grows in its engine's turns."""

    def __init__(self, generation: Generation, index: int, kv: Any, tokenizer: Any) -> None:
        self.generation = generation
        self.index = index
        self.kv = kv
        self.next_token = -1  # written, and not yet computed; none as long as the prompt is not
        self.begun_at: float | None = None  # when its prompt was first computed
        self.finish_reason: str | None = None
        self.sight: Sight | None = None  # of its pictures, once they are looked at
        self._sampler = Sampler(generation.sampling, index)
        self._grammar = None if generation.grammar is None else generation.grammar.fork()
        self._text = TextStream(tokenizer, generation.ids, generation.stop)
        self._num_tokens = 0
        self._unsaid = 0  # tokens whose text was not handed out yet

    def take(self, logits: torch.Tensor, ends: frozenset[int]) -> None:
        """Choose the next token by logits (V,) and hand out its text; sets `finish_reason`.

        Raises JobFailed.
        """
        if self._grammar is not None:
            logits = self._grammar.allowed(logits)
        token = self._sampler.choose(logits)
        self._num_tokens += 1
        self._unsaid += 1
        text = ""
        if token in ends:
            self.finish_reason = "stop"
        else:
            text = self._text.add(token)
            self.next_token = token
            is_whole = self._grammar is not None and self._grammar.take(token)
            if self._text.is_stopped or is_whole:
                self.finish_reason = "stop"
            elif self._num_tokens == self.generation.max_tokens:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._text.finish()
        if text or self.finish_reason is not None:
            self._say(text)

    def cancel(self) -> None:
        """End with what there is."""
        self.finish_reason = "cancelled"
        self._say(self._text.finish())

    def _say(self, text: str) -> None:
        piece = Piece(self.index, text, self._unsaid, self.finish_reason)
        self._unsaid = 0
        self.generation.pieces.put(piece)


def keys_of(generation: Generation) -> np.ndarray:
    """What each position of the prompt is computed from, to compare prompts by."""
    keys = np.array(generation.ids, dtype=np.int64)
    for picture in generation.pictures:
        # All of its tokens are the same. No token has a negative number.
        keys[picture.start : picture.start + picture.num_tokens] = -1 - picture.digest
    return keys


def now() -> float:
    return time.perf_counter()
