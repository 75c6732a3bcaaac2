"""The rows of an evaluation, one JSON line per question, from which a killed job resumes.

Rows are appended in the order of the questions. A line left incomplete by a crash is removed before
the next one is written. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import orjson

from ..files.appending import append, sync

ROWS = "rows.jsonl"  # in the run directory
_SYNC_S = 1.0  # between two flushes to the disk: at most so much is evaluated again


class Journal:
    """The rows of a job, opened for appending.

    `rows`: those of an earlier execution. They are dropped, and `is_stale` is set, if they are of
    other questions or other weights.
    """

    def __init__(self, path: Path, questions: Sequence[str], weights: str | None) -> None:
        """questions: identities in their order. weights: digest of the model's files."""
        self._path = path
        self.is_stale = False
        self.rows: list[dict[str, Any]] = []
        whole = 0
        if path.exists():
            with path.open("rb") as file:
                for line in file:
                    row = _parsed(line)
                    if row is None:
                        break
                    number = len(self.rows)
                    expected = questions[number] if number < len(questions) else None
                    if (row.get("question"), row.get("weights")) != (expected, weights):
                        self.is_stale = True
                        break
                    self.rows.append(row)
                    whole += len(line)
        if self.is_stale:
            self.rows, whole = [], 0
        self._file = path.open("ab", buffering=0)
        self._file.truncate(whole)
        self._synced_at = time.monotonic()

    def append(self, row: dict[str, Any]) -> None:
        """Append the row of the next question. Raises OSError without an effect."""
        append(self.fileno(), orjson.dumps(row) + b"\n", self._path)
        self.rows.append(row)

    def sync_if_due(self) -> None:
        """Flush the rows to the disk, unless that was done within the last second.

        Apart from `append`, which is repeated on a full disk: its row would be there twice.
        """
        if time.monotonic() - self._synced_at >= _SYNC_S:
            self.sync()

    def fileno(self) -> int:
        """Return the descriptor of the file."""
        return self._file.fileno()

    def sync(self) -> None:
        """Flush the rows to the disk."""
        sync(self.fileno(), self._path)
        self._synced_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sync()
        self._file.close()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete rows of a job. Raises OSError."""
    with path.open("rb") as file:
        for line in file:
            row = _parsed(line)
            if row is None:
                return
            yield row


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line; None if the line is incomplete or damaged."""
    row = None
    if line.endswith(b"\n"):
        with suppress(orjson.JSONDecodeError):
            row = orjson.loads(line)
    return row if isinstance(row, dict) else None
