"""Checks that all processes of a job have read the same: files may differ between machines."""

from __future__ import annotations

from collections.abc import Mapping

from ..context import Ranks
from ..errors import JobFailed


def require_same(ranks: Ranks, option: str, digests: Mapping[str, str]) -> None:
    """Raise JobFailed, on every rank, where two have different digests under one name."""
    first, *others = ranks.gather(dict(digests))
    for rank, found in enumerate(others, 1):
        for name in first.keys() & found.keys():
            if found[name] != first[name]:
                raise JobFailed(
                    f"{option}: must be the same on all nodes, got another {name} on rank {rank} "
                    f"of {ranks.size}"
                )
