"""The source files of a user's rewards or environment: checkpoints have their digests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..context import Context
from ..environments.pool import Pool
from ..rewards.user_rewards import KeywordReward, PositionalReward
from ..user_code.modules import SOURCES, changed, digests


class Sources:
    """The files of the modules that own rewards use; `digests`: by path, {} without own rewards."""

    def __init__(self, rewards: Iterable[Any]) -> None:
        self._are_own = any(isinstance(one, PositionalReward | KeywordReward) for one in rewards)
        self.digests = digests() if self._are_own else {}

    def about(self) -> dict[str, Any]:
        """Return the entry of a checkpoint's manifest; modules may have been imported meanwhile."""
        if not self._are_own:
            return {}
        self.digests = digests(self.digests)
        return {SOURCES: self.digests}


class EnvironmentSources:
    """The files of an environment's modules, as its processes load them."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @property
    def digests(self) -> dict[str, str]:
        """By path."""
        return self._pool.sources

    def about(self) -> dict[str, Any]:
        """Return the entry of a checkpoint's manifest."""
        return {SOURCES: dict(self._pool.sources)}


def warn_of_changes(ctx: Context, checkpoint: Path, option: str) -> None:
    """Warn of files of `option` that have changed since a checkpoint."""
    files = changed(ctx.checkpoints.about(checkpoint).get(SOURCES, {}))
    if files:
        ctx.emit(
            "warning",
            message=f"{option}: changed since {checkpoint.name}: {', '.join(files)}; the steps "
            "from here on differ from those of an uninterrupted run",
            files=files,
        )
