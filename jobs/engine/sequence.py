"""A running sequence: a prompt, and one completion of it that grows by a token per step."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from typing import Any

import numpy as np
import torch

from .detokenizer import TextStream
from .drafts import Lookup
from .image_encoding import PromptImages
from .request import Piece, Request, TokenLogprob
from .sampling import SequenceSampler
from .thinking import ThinkingBudget


class Sequence(ABC):
    """What the scheduler needs of a completion: its KV cache, and how it grows."""

    def __init__(self, request: Request, index: int, kv: Any) -> None:
        self.request = request
        self.index = index
        self.kv = kv
        self.next_token = -1  # drawn, not yet computed; -1 during prefill
        self.begun_at: float | None = None  # start of prefill, then of decoding
        self.finish_reason: str | None = None
        self.images: PromptImages | None = None  # from the start of prefill on
        self.lookup: Lookup | None = None  # None: its tokens are not drafted

    @abstractmethod
    def accept(self, token: int, ends: frozenset[int], logprob: TokenLogprob | None = None) -> None:
        """Append a drawn token; may set `finish_reason`. Raises JobFailed."""

    def end_scored(self) -> None:
        """End without a token: only the prompt was to be scored."""
        self.finish_reason = "length"

    def cancel(self) -> None:
        """End with the tokens so far."""
        self.finish_reason = "cancelled"

    @property
    def offset(self) -> int:
        """What is added to the positions of text after images."""
        return 0 if self.images is None else self.images.offset


class TextSequence(Sequence):
    """A completion whose text goes out in pieces: with a sampler, a grammar and a detokenizer."""

    def __init__(self, request: Request, index: int, kv: Any, tokenizer: Any) -> None:
        super().__init__(request, index, kv)
        self.sampler = SequenceSampler(request.sampling, index)
        self._grammar = None if request.grammar is None else request.grammar.fork()
        self._thinking = (
            None if request.thinking is None else ThinkingBudget(request.thinking, request.ids)
        )
        self._text = TextStream(
            tokenizer, request.ids, request.stop, keeps_special=request.keeps_special
        )
        self._end_token: int | None = None
        self._num_tokens = 0
        self._unsent: list[int] = []  # token ids that are in no piece yet
        # The tokens that no piece has the log-probability of: where the text of the first one
        # begins, and where those end whose text is known, in UTF-8 bytes.
        self._logprobs: list[TokenLogprob] = []
        self._text_begin, self._text_ends = 0, list[int]()
        self._emitted_bytes = 0

    def adjusted(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits (V,) to sample from, with grammar and thinking-token budget applied.

        Raises JobFailed.
        """
        if self._grammar is not None:
            logits = self._grammar.allowed(logits)
        due = None if self._thinking is None else self._thinking.due
        if due is None or bool(logits[due] == -torch.inf):
            return logits
        return torch.full_like(logits, -torch.inf).index_fill(
            0, torch.tensor(due, device=logits.device), 0.0
        )

    def accept(self, token: int, ends: frozenset[int], logprob: TokenLogprob | None = None) -> None:
        self._num_tokens += 1
        if self._thinking is not None:
            self._thinking.count(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        self._unsent.append(token)
        text = ""
        if token in ends:
            self.finish_reason, self._end_token = "stop", token
        else:
            text = self._text.add(token)
            self.next_token = token
            if not self._text.is_waiting:
                known = len(self._logprobs) - len(self._text_ends)
                self._text_ends += [self._text.num_bytes] * known
            is_complete = self._grammar is not None and self._grammar.advance(token)
            if self._text.is_stopped or is_complete:
                self.finish_reason = "stop"
            elif self._num_tokens == self.request.max_tokens:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._text.finish()
        if text or self.finish_reason is not None:
            self._emit(text)

    def end_scored(self) -> None:
        super().end_scored()
        self._emit("")

    def cancel(self) -> None:
        super().cancel()
        self._emit(self._text.finish())

    def _emit(self, text: str) -> None:
        self._emitted_bytes += len(text.encode())
        kept_bytes = None
        if self.finish_reason is None:
            count = bisect_right(self._text_ends, self._emitted_bytes)
        else:
            count = len(self._logprobs)
            if self._emitted_bytes < self._text.num_bytes:
                kept_bytes = self._emitted_bytes - self._text_begin
        logprobs = tuple(self._logprobs[:count])
        if self._text_ends[:count]:
            self._text_begin = self._text_ends[:count][-1]
        del self._logprobs[:count], self._text_ends[:count]
        piece = Piece(
            self.index,
            text,
            self._unsent,
            self.finish_reason,
            self._end_token,
            logprobs,
            kept_bytes,
        )
        self._unsent = []
        self.request.pieces.put(piece)


def keys_of(request: Request) -> np.ndarray:
    """Prefix cache key of a prompt, (T,) int64: token ids, and digests in place of image tokens.

    Prompts of different adapters have no key in common.
    """
    keys = np.array(request.ids, dtype=np.int64)
    for image in request.images:
        # All placeholder tokens are alike; token ids are never negative.
        keys[image.start : image.start + image.num_tokens] = -1 - image.digest
    return keys if request.adapter is None else keys ^ (request.adapter.number << 32)


def now() -> float:
    return time.perf_counter()
