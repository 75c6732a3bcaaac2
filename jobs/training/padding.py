"""Checks the padding token of a training. Imports torch in its function."""

from __future__ import annotations

from typing import Any

from ..models.vocabulary import Vocabulary


def check_padding(vocabulary: Vocabulary, tokenizer: Any, model: Any) -> None:
    """Raise JobFailed if batches are padded, with a token that the model has no embedding for."""
    from ..packing.attention import can_pack

    if tokenizer.pad_token_id is not None and not can_pack(model):
        vocabulary.check("model: its padding token", [tokenizer.pad_token_id])
