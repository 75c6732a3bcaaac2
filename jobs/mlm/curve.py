"""The learning curve of an MLM job as a file: metrics.csv, with one row per step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

COLUMNS = (
    "step",
    "total_loss",
    "mlm_loss",
    "mnm_loss",
    "mlm_validation_accuracy",
    "mnm_validation_accuracy",
    "mlm_weight",
    "mnm_weight",
)


class Curve:
    """The rows of metrics.csv, rewritten from the checkpoint on resume."""

    def __init__(self, path: Path, rows: Iterable[Sequence[float]] = ()) -> None:
        self.path = path
        self.rows = [list(row) for row in rows]
        lines = [",".join(COLUMNS), *map(_csv, self.rows)]
        path.write_text("".join(f"{line}\n" for line in lines))

    def add(self, values: Mapping[str, float]) -> None:
        """Append the row of a step; missing values stay empty."""
        self.rows.append([values.get(name, math.nan) for name in COLUMNS])
        with self.path.open("a") as file:
            file.write(_csv(self.rows[-1]) + "\n")

    def amend(self, values: Mapping[str, float]) -> None:
        """Add values to the last row."""
        row = self.rows[-1]
        with self.path.open("r+") as file:
            file.seek(self.path.stat().st_size - len(_csv(row)) - 1)
            file.truncate()
            row[:] = [values.get(name, old) for name, old in zip(COLUMNS, row, strict=True)]
            file.write(_csv(row) + "\n")


def _csv(row: Sequence[float]) -> str:
    step, *values = row
    return ",".join(
        [str(int(step)), *("" if math.isnan(value) else str(value) for value in values)]
    )
