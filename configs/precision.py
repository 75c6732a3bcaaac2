"""The names of the precisions that models compute in. `native` is the dtype of a model's weights.

Settings, options and stored specs of earlier versions spell `native` as `own` or `model`. They are
still read: only `current` knows those names.
"""

from __future__ import annotations

NATIVE = "native"
PRECISIONS = (NATIVE, "bf16", "int8", "int4")
FORMER_NAMES = {"own": NATIVE, "model": NATIVE}


def current(value: object) -> object:
    """Return the name of a precision of today; any other value as it is."""
    return FORMER_NAMES.get(value, value) if isinstance(value, str) else value
