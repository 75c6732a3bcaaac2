"""Completions that keep to a JSON Schema: llguidance says which tokens may come next."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from ..context import WarmModel
from ..errors import JobFailed
from .json_schemas import FIELD, grammar_of, unsupported


class Grammar:
    """Where a text stands in its grammar. What is `fork`ed goes on by itself."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fork(self) -> Grammar:
        return Grammar(self._matcher.deep_copy())

    def allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits (V,) with -inf for what must not come next. Raises JobFailed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        may_come = torch.from_numpy(np.unpackbits(bits, count=len(logits), bitorder="little"))
        return logits.masked_fill(may_come.to(logits.device) == 0, float("-inf"))

    def take(self, token: int) -> bool:
        """Go on by a token that is allowed; return whether the text is whole by it."""
        self._matcher.consume_token(token)
        self._check()
        is_whole: bool = self._matcher.is_stopped()
        return is_whole

    def _check(self) -> None:
        if self._matcher.is_error():
            raise JobFailed(f"{FIELD}: {unsupported(self._matcher.get_error())}")


class Grammars:
    """Makes the grammars of one model, from any thread."""

    def __init__(self, warm: WarmModel, vocabulary: int, ends: Collection[int]) -> None:
        """`vocabulary`: the number of logits. `ends`: the tokens that end a completion."""
        self._warm = warm
        self._vocabulary = vocabulary
        self._ends = sorted(ends)
        self._making = threading.Lock()
        self._tokenizer: Any = None

    def make(self, schema: str) -> Grammar:
        """Return the grammar of a JSON Schema. Raises SpecError and JobFailed.

        The first one waits seconds for llguidance to read a large vocabulary.
        """
        from llguidance import LLMatcher

        grammar = grammar_of(schema)
        with self._making:
            if self._tokenizer is None:
                self._tokenizer = self._read_tokenizer()
        return Grammar(LLMatcher(self._tokenizer, grammar))

    def _read_tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(
                self._warm.tokenizer, n_vocab=self._vocabulary, eos_token=self._ends or None
            )
        except ValueError as error:
            raise JobFailed(
                f"{FIELD}: unsupported tokenizer ({self._warm.name}): {error}"
            ) from error
