"""The reward log: a JSON line for each completion that a step was trained on, with its rewards.

A resumed job truncates the file to the step of its checkpoint, so that it has each step once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from ..errors import JobFailed
from ..files.journal import Journal, begins_with, lines


class RewardLog(Journal):
    """Appends to the file of one job; lines after `step` are removed when it is opened.

    Raises JobFailed if the file cannot be opened or belongs to another job.
    """

    def __init__(self, path: Path, job_id: str, *, step: int) -> None:
        self._job_id = job_id
        kept = 0
        try:
            if path.exists():
                begin = b'{"job":' + orjson.dumps(job_id)
                if not (begins_with(path, begin) or _has_zeros_only(path)):
                    raise JobFailed(
                        f"reward_log: must be a new file, got {path}, which has other content"
                    )
                kept = max((end for row, end in lines(path) if row["step"] <= step), default=0)
            super().__init__(path, kept, is_users=True)
        except OSError as error:
            raise JobFailed(f"reward_log: must be a file to write, got {path}: {error}") from error

    def add(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        """Append the lines of a step atomically. Raises OSError (a full disk).

        `rows`: each with its `completion`, whose text may have lone surrogates from a tokenizer.
        """
        lines = []
        for row in rows:
            text = row["completion"].encode(errors="replace").decode()
            line = {"job": self._job_id, "step": step, **row, "completion": text}
            lines.append(orjson.dumps(line))
        self.write(b"\n".join([*lines, b""]))


def _has_zeros_only(path: Path) -> bool:
    """Whether a file has nothing but zeros, as a power failure may leave it."""
    with path.open("rb") as file:
        return all(not part.strip(b"\0") for part in iter(lambda: file.read(1 << 20), b""))
