"""The length in tokens at which training rows are truncated. Imports no torch."""

from __future__ import annotations

from typing import Any

from ..errors import JobFailed
from ..models.architectures import positions_in

MAX_LENGTH = 1024  # tokens of a row, unless the options or the model's positions say otherwise


def row_length(requested: int | None, positions: int | None) -> int:
    """Return the maximum row length: as requested, or limited by the positions of a model."""
    return requested or min(MAX_LENGTH, positions or MAX_LENGTH)


def most_tokens_of_a_row(requested: int | None, model: Any, name: str) -> int:
    """Return `row_length` for a model.

    Raises JobFailed if more tokens are requested than the model has positions.
    """
    limit = positions_in(model.config)
    max_length = row_length(requested, limit)
    if limit is not None and max_length > limit:
        raise JobFailed(
            f"max_length: must be at most {limit} (the positions of {name}), got {max_length}"
        )
    return max_length
