"""A sweep as a Python object, with a view for notebooks."""

from __future__ import annotations

from typing import Any

from .group import Group
from .html import columns_html


class Sweep(Group):
    """The jobs of a sweep."""

    def info(self) -> dict[str, Any]:
        """Return what `warmd show --json` prints: `points` with `mean`, `low`, `high`, …"""
        return self._client.groups.sweep(self.id)

    def best(self) -> dict[str, Any] | None:
        """Return the best point: `values`, `mean`, `low`, `high`, `jobs`; None before any score."""
        info = self.info()
        found: dict[str, Any] | None = (
            None if info["best"] is None else info["points"][info["best"]]
        )
        return found

    def table(self) -> dict[str, list[Any]]:
        """Return the points as columns: their values, `step`, `n`, `mean`, `low` and `high`."""
        points = self.info()["points"]
        names = list(dict.fromkeys(name for point in points for name in point["values"]))
        columns = {name: [point["values"].get(name) for point in points] for name in names}
        scores = ("step", "n", "mean", "low", "high")
        return columns | {name: [point[name] for point in points] for name in scores}

    def _repr_html_(self) -> str:
        return columns_html(self.id, self.table())
