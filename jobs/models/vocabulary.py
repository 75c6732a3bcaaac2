"""The tokens that a model has embeddings for. Imports neither torch nor transformers.

A tokenizer can have more: tokens that were added to it without resizing the embeddings. Any other
token of it can be used; a text with one of these is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import JobFailed

_NO_TOKEN = 2**31  # tokenizers take no larger ids


@dataclass(frozen=True)
class Vocabulary:
    """The tokens with an id below `size`."""

    size: int
    model: str  # name of the model, for messages
    text_of: Callable[[int], str | None]  # of a token; None: the tokenizer has none with this id

    @classmethod
    def of(cls, name: str, model: Any, tokenizer: Any) -> Vocabulary:
        """Return the vocabulary of a loaded model (of transformers)."""
        return cls(
            size=model.get_input_embeddings().num_embeddings,
            model=name,
            text_of=tokenizer.convert_ids_to_tokens,
        )

    def check(self, field: str, ids: Sequence[int]) -> None:
        """Raise JobFailed for `field` if a token is not in the vocabulary."""
        problem = self.problem(ids)
        if problem is not None:
            raise JobFailed(f"{field}: {problem}")

    def problem(self, ids: Sequence[int]) -> str | None:
        """Return the problem of a token that is not in the vocabulary; None: all are."""
        highest = max(ids, default=0)
        if highest < self.size:
            return None
        text = self.text_of(highest) if highest < _NO_TOKEN else None
        if text is None:
            return f"token {highest} is not among the {self.size} of {self.model}"
        return (
            f"token {highest} ({text[:40]!r}) is not among the {self.size} of {self.model}: it was "
            "added to the tokenizer and not to the model; remove it, or resize the embeddings "
            "(resize_token_embeddings) and train them"
        )

    def beyond(self, tokenizer: Any) -> list[str]:
        """Return the tokens of a tokenizer (of transformers) that are not in the vocabulary."""
        found = tokenizer.get_vocab().items()
        return sorted(text for text, token in found if token >= self.size)
