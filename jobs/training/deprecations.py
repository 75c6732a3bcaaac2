"""Deprecation warnings within the libraries, which their callers cannot avoid."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_deprecations() -> Iterator[None]:
    """Silence warnings about deprecated functions of transformers 5.23 that TRL 1.16 calls."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing", FutureWarning)
        yield
