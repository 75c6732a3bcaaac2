"""Deprecations within the libraries, which no caller of theirs can avoid."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_deprecations() -> Iterator[None]:
    """Silence what TRL 1.16 uses and transformers 5.23 deprecates, at every generation or loss."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing", FutureWarning)
        yield
