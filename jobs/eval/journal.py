"""The rows of an evaluation, one JSON line per question, from which a killed job resumes.

Rows are appended in the order of the questions. A line left incomplete by a crash is removed before
the next one is written. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from ..files import journal

ROWS = "rows.jsonl"  # in the run directory
_SYNC_S = 1.0  # between two flushes to the disk: at most so much is evaluated again


class Journal(journal.Journal):
    """The rows of a job, opened for appending.

    `rows`: those of an earlier execution. They are dropped, and `is_stale` is set, if they are of
    other questions or other weights.
    """

    def __init__(self, path: Path, questions: Sequence[str], weights: str | None) -> None:
        """questions: identities in their order. weights: digest of the model's files."""
        self.is_stale = False
        self.rows: list[dict[str, Any]] = []
        kept = 0
        for number, (row, end) in enumerate(journal.lines(path) if path.exists() else ()):
            expected = questions[number] if number < len(questions) else None
            if (row.get("question"), row.get("weights")) != (expected, weights):
                self.is_stale = True
                self.rows, kept = [], 0
                break
            self.rows.append(row)
            kept = end
        super().__init__(path, kept)
        self._synced_at = time.monotonic()

    def append(self, row: dict[str, Any]) -> None:
        """Append the row of the next question. Raises OSError without an effect."""
        self.write(orjson.dumps(row) + b"\n")
        self.rows.append(row)

    def sync_if_due(self) -> None:
        """Flush the rows to the disk, unless that was done within the last second.

        Apart from `append`, which is repeated on a full disk: its row would be there twice.
        """
        if time.monotonic() - self._synced_at >= _SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Flush the rows to the disk."""
        super().sync()
        self._synced_at = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.sync()
        self.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a job. Raises OSError."""
    return [row for row, _ in journal.lines(path)]
