"""The reward log: a JSON line for each completion that a step was trained on, with its rewards.

A resumed job truncates the file to the step of its checkpoint, so that it has each step once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from ..errors import JobFailed
from ..files import umask
from ..files.appending import append, sync


class RewardLog:
    """Appends to the file of one job; lines after `step` are removed when it is opened.

    Raises JobFailed if the file cannot be opened or belongs to another job.
    """

    def __init__(self, path: Path, job_id: str, *, step: int) -> None:
        self.path = path
        self._job_id = job_id
        try:
            self._file = umask.for_user(str(path), os.O_RDWR | os.O_APPEND)
            self._cut(path, step)
        except OSError as error:
            raise JobFailed(f"reward_log: must be a file to write, got {path}: {error}") from error

    def write(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        """Append the lines of a step atomically. Raises OSError (a full disk).

        `rows`: each with its `completion`, whose text may have lone surrogates from a tokenizer.
        """
        lines = []
        for row in rows:
            text = row["completion"].encode(errors="replace").decode()
            line = {"job": self._job_id, "step": step, **row, "completion": text}
            lines.append(orjson.dumps(line))
        append(self._file, b"\n".join([*lines, b""]), self.path)

    def flush(self) -> None:
        """Make the lines durable; called before the checkpoint of their step is."""
        sync(self._file, self.path)

    def _cut(self, path: Path, step: int) -> None:
        begin = b'{"job":' + orjson.dumps(self._job_id)
        end = 0
        with open(path, "rb") as file:
            for line in file:
                is_own = line.startswith(begin)
                # A power failure may leave the start of a line, or zeros.
                is_torn = begin.startswith(line) or not line.strip(b"\0")
                if end == 0 and not is_own and not is_torn:
                    raise JobFailed(
                        f"reward_log: must be a new file, got {path}, which has other content"
                    )
                if not is_own or not line.endswith(b"\n") or orjson.loads(line)["step"] > step:
                    break
                end += len(line)
        os.ftruncate(self._file, end)
