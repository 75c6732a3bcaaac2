"""The completions of a job that are kept, found by step, row and text.

The file of a long training has hundreds of steps and up to 200 MB. Its lines begin with step and
row, by which those of other steps are left out unparsed, in a tenth of the time; and steps never
decrease, so that one step is found without reading the others.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import orjson

from ....jobs.errors import NotFound
from ....jobs.grpo.completions import FILE
from ...runs import completions
from ...runs.rundir import RunDir

_BEGINNING = re.compile(rb'\{"step":(\d+),"row":(\d+),')
_READ_WHOLE = 64 * 1024  # bytes of a file that are read, rather than searched by halves


def find(
    rundir: RunDir, *, step: int | None, row: int | None, text: str, limit: int
) -> dict[str, Any]:
    """Return the latest `limit` completions, and the steps of which some are kept.

    Without `step`: with `row` or `text` those of all steps, else those of the latest step. Raises
    NotFound.
    """
    is_of_one_step = step is not None or (row is None and not text)
    text = text.casefold()
    steps: dict[int, None] = {}
    lines: deque[bytes] = deque(maxlen=limit)
    with _opened(rundir) as file:
        sections = _sections(file) if file is not None and is_of_one_step else {}
        if step is None:
            step = max(sections, default=None)
        steps |= dict.fromkeys(sections)
        begin = 0 if step is None else sections.get(step, 0)
        for at, row_of_it, line in _of_events(rundir) if file is None else _lines(file, begin):
            if sections and at != step:
                break
            if step is None and is_of_one_step and at not in steps:
                lines.clear()  # of an earlier step than the latest
            steps[at] = None
            if step in (None, at) and row in (None, row_of_it) and _has(line, text):
                lines.append(line)
    if step is not None and step not in steps:
        raise NotFound(f"step: {rundir.path.name} has no completions of step {step}")
    if step is None and is_of_one_step:
        step = max(steps, default=None)
    return {
        "step": step,
        "samples": [one for line in lines if (one := _parsed(line)) is not None],
        "steps": list(steps),
        "first_step": min(steps, default=None),
        "last_step": max(steps, default=None),
        "previous_step": max((s for s in steps if step is not None and s < step), default=None),
        "next_step": min((s for s in steps if step is not None and s > step), default=None),
    }


@contextmanager
def _opened(rundir: RunDir) -> Iterator[BinaryIO | None]:
    """Open the file: a job may replace it meanwhile. None: of an earlier version, or none yet."""
    try:
        file = (rundir.path / FILE).open("rb")
    except FileNotFoundError:
        yield None
        return
    with file:
        yield file


def _of_events(rundir: RunDir) -> Iterator[tuple[int, int | None, bytes]]:
    """Yield step, row and JSON of each completion that an earlier version has kept."""
    for one in completions.read(rundir):
        yield one["step"], one["row"], orjson.dumps(one)


def _lines(file: BinaryIO, begin: int) -> Iterator[tuple[int, int | None, bytes]]:
    """Yield step, row and JSON of each completion, up to a damaged or unfinished line.

    `begin`: the offset of the first one.
    """
    file.seek(begin)
    for line in file:
        if not line.endswith(b"\n"):
            return
        if known := _BEGINNING.match(line):
            yield int(known[1]), int(known[2]), line
            continue
        if (parsed := _parsed(line)) is None:
            return
        yield parsed["step"], parsed.get("row"), line


class _Unsorted(Exception):
    """A line of a smaller step than the one before it, or without a step."""


def _sections(file: BinaryIO) -> dict[int, int]:
    """Return the offset of the first line of each step; nothing if it has to be searched for.

    Between two lines of the same step there is no other step: most of the file is not read.
    """
    found: dict[int, int] = {}
    try:
        end = file.seek(0, os.SEEK_END)
        if (first := _line_from(file, 0, end)) is not None:
            found[first[0]] = 0
            _add_sections(file, first, (None, end), found)
    except _Unsorted:
        return {}
    return found


def _add_sections(
    file: BinaryIO, low: tuple[int, int], high: tuple[int | None, int], found: dict[int, int]
) -> None:
    """Add the first lines of the steps between two lines (step, offset); `high`: or the end."""
    if low[0] == high[0]:
        return
    middle = None
    if high[1] - low[1] > _READ_WHOLE:
        middle = _line_from(file, (low[1] + high[1]) // 2, high[1], least=low[0])
    if middle is not None:
        _add_sections(file, low, middle, found)
        found.setdefault(*middle)
        _add_sections(file, middle, high, found)
        return
    step, offset = low
    file.seek(offset)
    while offset < high[1] and (line := file.readline()).endswith(b"\n"):
        step = _step_of(line, least=step)
        found.setdefault(step, offset)
        offset += len(line)


def _line_from(file: BinaryIO, offset: int, end: int, *, least: int = 0) -> tuple[int, int] | None:
    """Return step and offset of the first line that begins there or later; None before `end`."""
    file.seek(max(0, offset - 1))
    if offset:
        file.readline()
    begin, line = file.tell(), file.readline()
    if begin >= end or not line.endswith(b"\n"):
        return None
    return _step_of(line, least=least), begin


def _step_of(line: bytes, *, least: int) -> int:
    known = _BEGINNING.match(line)
    if known is None or int(known[1]) < least:
        raise _Unsorted
    return int(known[1])


def _has(line: bytes, text: str) -> bool:
    return not text or text in ((_parsed(line) or {}).get("completion") or "").casefold()


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None for one that a crash has damaged."""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
