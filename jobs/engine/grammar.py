"""Constrained decoding by a grammar: token masks from llguidance."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from ..context import WarmModel
from ..errors import JobFailed
from .grammar_checks import unsupported

_MOST_STATES = 50_000  # of a lexer, of 1 to 2 kB each


class Grammar:
    """The parser state of one completion. `fork` returns an independent copy."""

    def __init__(self, matcher: Any, field: str, noun: str) -> None:
        """`field`, `noun`: as for `grammar_checks.check`. Raises JobFailed."""
        self._matcher = matcher
        self._field = field
        self._noun = noun
        self._check()

    def fork(self) -> Grammar:
        return Grammar(self._matcher.deep_copy(), self._field, self._noun)

    def allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits (V,) with -inf for tokens that the grammar forbids. Raises JobFailed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        is_allowed = torch.from_numpy(np.unpackbits(bits, count=len(logits), bitorder="little"))
        return logits.masked_fill(is_allowed.to(logits.device) == 0, float("-inf"))

    def advance(self, token: int) -> bool:
        """Advance by an allowed token; return whether the text is complete."""
        self._matcher.consume_token(token)
        self._check()
        is_complete: bool = self._matcher.is_stopped()
        return is_complete

    def _check(self) -> None:
        if self._matcher.is_error():
            problem = unsupported(self._matcher.get_error(), self._noun)
            raise JobFailed(f"{self._field}: {problem}")


class Grammars:
    """Compiles grammars for one model's tokenizer, from any thread."""

    def __init__(self, warm: WarmModel, vocabulary: int, ends: Collection[int]) -> None:
        """`vocabulary`: number of logits. `ends`: end-of-sequence tokens."""
        self._warm = warm
        self._vocabulary = vocabulary
        self._ends = sorted(ends)
        self._making = threading.Lock()
        self._tokenizer: Any = None

    def make(self, grammar: str, field: str, noun: str) -> Grammar:
        """Compile a grammar of llguidance that was checked before. Raises JobFailed.

        `field`, `noun`: as for `grammar_checks.check`. The first call takes seconds for a large
        vocabulary, which llguidance has to read.
        """
        from llguidance import LLMatcher, LLParserLimits

        with self._making:
            if self._tokenizer is None:
                self._tokenizer = self._read_tokenizer(field)
        limits = LLParserLimits(max_lexer_states=_MOST_STATES)
        return Grammar(LLMatcher(self._tokenizer, grammar, limits=limits), field, noun)

    def _read_tokenizer(self, field: str) -> Any:
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(
                self._warm.tokenizer, n_vocab=self._vocabulary, eos_token=self._ends or None
            )
        except ValueError as error:
            raise JobFailed(
                f"{field}: unsupported tokenizer ({self._warm.name}): {error}"
            ) from error
