"""The learning curve of an MLM job as a file: metrics.csv, with one row per step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..files.appending import append

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
        self._begin = 0  # offset of the last row in the file, in bytes
        lines = [",".join(COLUMNS), *map(_csv, self.rows)]
        self._end = path.write_bytes("".join(f"{line}\n" for line in lines).encode())
        if self.rows:
            self._begin = self._end - len(_csv(self.rows[-1])) - 1

    def add(self, values: Mapping[str, float]) -> None:
        """Append the row of a step; missing values stay empty. Raises OSError without an effect."""
        row = [values.get(name, math.nan) for name in COLUMNS]
        self._write(row, self._end)
        self.rows.append(row)

    def amend(self, values: Mapping[str, float]) -> None:
        """Add values to the last row. Raises OSError; then it can be repeated."""
        old = self.rows[-1]
        row = [values.get(name, value) for name, value in zip(COLUMNS, old, strict=True)]
        self._write(row, self._begin)
        self.rows[-1] = row

    def _write(self, row: Sequence[float], begin: int) -> None:
        """Write the last row of the file, which begins at this byte."""
        line = f"{_csv(row)}\n".encode()
        with self.path.open("ab", buffering=0) as file:
            file.truncate(begin)
            append(file.fileno(), line, self.path)
        self._begin, self._end = begin, begin + len(line)


def _csv(row: Sequence[float]) -> str:
    step, *values = row
    return ",".join(
        [str(int(step)), *("" if math.isnan(value) else str(value) for value in values)]
    )
