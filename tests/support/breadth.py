"""The parameters of wide tests, of which only some are tested with every change."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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


def mostly_slow(cases: Iterable[Any], *, but: Collection[Any]) -> list[Any]:
    """Each case, marked slow but for some; what has a mark already, as nightly, keeps that one."""
    found = []
    for one in cases:
        case = one if hasattr(one, "marks") else pytest.param(one)
        name = case.values[0] if len(case.values) == 1 else case.values
        marks = case.marks if case.marks or name in but else pytest.mark.slow
        found.append(pytest.param(*case.values, id=case.id, marks=marks))
    return found
