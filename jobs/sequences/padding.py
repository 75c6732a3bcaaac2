"""Checks the padding of models whose batches are not packed. Imports torch in its function."""

from __future__ import annotations

from ..context import WarmModel
from ..models.vocabulary import Vocabulary

# How results differ since RULES 2 (GRPO: 3), for the warning of a job that is resumed.
ROUNDED = "losses of padded batches round differently"


def check_padding(warm: WarmModel) -> None:
    """Raise JobFailed if batches are padded, with a token that the model has no embedding for."""
    from .attention import can_pack

    token = warm.tokenizer.pad_token_id
    if token is not None and not can_pack(warm.model):
        vocabulary = Vocabulary.of(warm.name, warm.model, warm.tokenizer)
        vocabulary.check("model: its padding token", [token])
