"""The parameters of wide tests, of which only some are tested with every change."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def packed_and_padded(
    cases: Mapping[str, Any], marks: pytest.MarkDecorator, *, but: Collection[tuple[str, str]]
) -> list[Any]:
    """Each case with packs and with padding, marked but for some (case, "packed" or "padded")."""
    return [
        pytest.param(
            *(case, how == "packed"),
            id=f"{name}-{how}",
            marks=() if (name, how) in but else marks,
        )
        for name, case in cases.items()
        for how in ("packed", "padded")
    ]
