"""From passages to batches of token ids: what embeddings and scores have in common.

Imports torch: only `run` of the encode kind imports it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..codegraph.sequences import Example
from ..context import WarmModel
from ..errors import JobFailed
from ..models.context_length import positions
from ..models.text_length import check_length, longest_token
from ..models.vocabulary import Vocabulary
from .journal import Floats
from .modules import modules_of
from .passages import Passage

USUAL_LENGTH = 512  # tokens, unless requested otherwise
_MARGIN = 64  # tokens: those near the end of a part of a text may differ from those of the whole
MOST_PADDING = 0.05  # of a batch's tokens

Ints = NDArray[np.int32]

# By model, for all jobs of a process: tokenizers are not thread-safe.
_locks: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()


class TokenizedPassage(NamedTuple):
    """A tokenized passage."""

    ids: Ints  # (T,)
    length: int  # tokens before it was cut to max_length, or of as much of it as was tokenized
    example: Example | None = None  # of the code-graph encoder: with all its columns
    types: Ints | None = None  # token types (T,), of models that take them
    is_shortened: bool = False  # whether it was cut as requested, before max_length

    @property
    def is_cut(self) -> bool:
        return self.is_shortened or self.is_too_long

    @property
    def is_too_long(self) -> bool:
        return self.length > len(self.ids)


class TextEncoder(ABC):
    """Computes `width` numbers per passage with one model."""

    width: int

    def __init__(
        self, warm: WarmModel, *, max_length: int | None, truncates: bool, device: str
    ) -> None:
        self._name = warm.name
        self._truncates = truncates
        self._tokenizer = warm.tokenizer
        self._model = warm.model
        self._vocabulary = Vocabulary.of(warm.name, warm.model, warm.tokenizer)
        self._device = device
        self._lock = _locks.setdefault(warm.model, threading.Lock())
        self.modules = modules_of(warm.path)
        self.max_length = self._length(max_length)

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What decides the numbers, for events and the result."""

    @property
    def most_tokens(self) -> str:
        """How many tokens a passage may have, for the warning of those that are cut."""
        return f"{self.max_length} tokens"

    @property
    def chains(self) -> tuple[Any, int]:
        """The tokenizer and the length that walks through the graph are made for."""
        return self._tokenizer.backend_tokenizer, self.max_length

    @abstractmethod
    def encode(self, rows: Sequence[TokenizedPassage]) -> Floats:
        """Return the numbers (n, width) float32 of one batch."""

    def prepare(self, sample: Sequence[TokenizedPassage]) -> None:  # noqa: B027
        """Prepare the weights; `sample`: all that will be encoded."""

    def quality(self) -> dict[str, Any] | None:
        """Return how far the numbers deviate from those of the native dtype; None: not at all."""
        return None

    def rows(self, passages: Sequence[Passage]) -> list[TokenizedPassage]:
        """Tokenize passages, each cut to `max_length`.

        Raises JobFailed naming one without tokens, with tokens beyond the model's vocabulary, or
        that would be cut though `truncates` is False.
        """
        rows = self._tokenized(passages)
        for passage, row in zip(passages, rows, strict=True):
            if row.is_too_long and not self._truncates:
                raise JobFailed(
                    f"input: [{passage.id}] must have at most {self.max_length} tokens for "
                    f"{self._name}, got {row.length}"
                )
            if not len(row.ids):
                raise JobFailed(f"input: {passage.id} has no tokens")
            self._vocabulary.check(f"input: {passage.id}", row.ids.tolist())
        return rows

    @abstractmethod
    def _tokenized(self, passages: Sequence[Passage]) -> list[TokenizedPassage]: ...

    def _check_characters(self, field: str, text: str) -> None:
        """Raise JobFailed, before it is tokenized, for a text that is certainly too long."""
        check_length(field, len(text), self._tokenizer, self.max_length, self._name)

    def _length(self, requested: int | None) -> int:
        limits = [self._tokenizer.model_max_length, positions(self._model)]
        limit = min(limit for limit in limits if limit is not None)
        if requested is not None and requested > limit:
            raise JobFailed(f"max_length: must be at most {limit} for this model, got {requested}")
        usual = getattr(self._model.config, "trained_length", None) or self.modules.max_length
        usual = usual or self._usual_length or limit
        return min(usual, limit) if requested is None else requested

    @property
    def _usual_length(self) -> int | None:
        """The maximum tokens of a passage where nothing names one; None: what the model accepts."""
        return None

    def _encodings(self, texts: Sequence[str], room: int) -> list[Any]:
        """Tokenize as much of each text as decides its first (or last) `room` tokens.

        Only the last tokens of a word, or of blanks, of many kilobytes may depend on more of it.

        The tokenizer itself must not truncate: that is a setting, and to change it would wait for
        all that others tokenize meanwhile, while no other thread of the process runs.
        """
        found: list[Any] = [None] * len(texts)
        size = (room + _MARGIN) * longest_token(self._tokenizer)
        to_do = list(range(len(texts)))
        while to_do:
            parts = [self._end_of(texts[n], size) for n in to_do]
            encodings = self._tokenizer(parts, add_special_tokens=False, verbose=False).encodings
            for number, encoding in zip(to_do, encodings, strict=True):
                found[number] = encoding
            to_do = [n for n in to_do if size < len(texts[n]) and len(found[n]) < room + _MARGIN]
            size *= 4  # of texts with long blanks, for example
        return found

    def _end_of(self, text: str, size: int) -> str:
        """Return `size` characters of the end of a text that is kept."""
        return text[:size] if self._tokenizer.truncation_side == "right" else text[-size:]

    def _pad(self, columns: Sequence[Ints], value: int) -> Tensor:
        padded = np.full((len(columns), max(map(len, columns))), value, np.int64)
        for row, column in zip(padded, columns, strict=True):
            row[: len(column)] = column
        return torch.from_numpy(padded).to(self._device)


def batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield batches as numbers of texts, the longest first.

    A batch has at most `size` texts, of such similar lengths that there is little padding, and no
    more tokens than so many of the usual length, unless it is one text.
    """
    batch: list[int] = []
    longest = total = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longest = longest if batch else lengths[row]
        padded = (len(batch) + 1) * longest
        is_wasteful = padded - total - lengths[row] > MOST_PADDING * padded
        is_full = len(batch) == size or padded > size * USUAL_LENGTH
        if batch and (is_full or is_wasteful):
            yield batch
            batch, total, longest = [], 0, lengths[row]
        batch.append(row)
        total += lengths[row]
    if batch:
        yield batch
