"""The completions that a job was trained on: `completions.jsonl` in its run directory.

A JSON line for each completion: step, row and number of its prompt, the prompt, the completion and
the answer, whole; its rewards, advantage and tokens, and why it ended. Kept are those of every N-th
step and of the latest steps. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from ..files.atomic import remove_unfinished, whole_file
from ..files.journal import Journal, lines
from ..files.shortage import lacks_space

FILE = "completions.jsonl"
LATEST = 5  # steps of which all completions are there, whatever their number
MOST_BYTES = 200 * 10**6
# The file is written anew when at least so many bytes, and half of it, are of steps that are not
# kept any more, or when it is full; then down to this part of its size.
_LEAST_DROPPED = 4 * 10**6
_FILLED = 0.75
_RETRY_STEPS = 100  # until the next attempt after one for which the disk had no room


class Completions:
    """The file of a job, open for appending; what follows `step` is removed when it is opened.

    The completions of every `every`-th step are kept; 0: none are. Raises OSError.
    """

    def __init__(self, path: Path, *, every: int, step: int, most_bytes: int = MOST_BYTES) -> None:
        self.every = every
        self._path = path
        self._most_bytes = most_bytes
        self._sizes: dict[int, int] = {}  # bytes, by step, in the order of the file
        self._rewrites_from = 0  # the step of the next attempt
        remove_unfinished(path)
        end = 0
        if path.exists():
            for row, size in lines(path):
                if not isinstance(found := row.get("step"), int) or found > step:
                    break  # of steps that are repeated, or damaged
                self._sizes[found] = self._sizes.get(found, 0) + size - end
                end = size
        self._journal = Journal(path, end)

    def add(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the completions of a step, whole or not at all. Raises OSError (a full disk)."""
        content = b"".join(_line({"step": step, **row}) for row in rows)
        self._journal.write(content)
        self._sizes[step] = len(content)
        total = sum(self._sizes.values())
        outdated = sum(size for one, size in self._sizes.items() if not self._is_kept(one, step))
        is_due = outdated >= max(_LEAST_DROPPED, total / 2) or total > self._most_bytes
        if is_due and step >= self._rewrites_from:
            try:
                self._rewrite(step)
            except OSError as error:
                if not lacks_space(error):
                    raise
                self._rewrites_from = step + _RETRY_STEPS

    def close(self) -> None:
        """Close the file."""
        self._journal.close()

    def _is_kept(self, step: int, latest: int) -> bool:
        return step % self.every == 0 or step > latest - LATEST

    def _rewrite(self, latest: int) -> None:
        """Remove the steps that are not kept, and the oldest of a file that is too large."""
        kept = {one: size for one, size in self._sizes.items() if self._is_kept(one, latest)}
        total = sum(kept.values())
        for one in [one for one in kept if one <= latest - LATEST]:
            if total <= _FILLED * self._most_bytes:
                break
            total -= kept.pop(one)
        with self._path.open("rb") as file, whole_file(self._path) as target:
            for step, size in self._sizes.items():
                content = file.read(size)
                if step in kept:
                    target.write(content)
        self._journal.close()
        self._journal = Journal(self._path, total)
        self._sizes = kept


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the completions of a file in the order of steps; none if there is no file."""
    try:
        for row, _ in lines(path):
            yield row
    except FileNotFoundError:
        return


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(row) + b"\n"
    except TypeError:  # texts may have lone surrogates, from a tokenizer
        texts = {
            name: value.encode(errors="replace").decode() if isinstance(value, str) else value
            for name, value in row.items()
        }
        return orjson.dumps(texts) + b"\n"
