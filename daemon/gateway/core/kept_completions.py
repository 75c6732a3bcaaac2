"""The completions of a job that are kept, found by step, row and text.

The file of a long training has hundreds of steps and up to 200 MB: its lines begin with step and
row, by which those of other steps are left out unparsed, in a tenth of the time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Any

import orjson

from ....jobs.errors import NotFound
from ....jobs.grpo.completions import FILE
from ...runs import completions
from ...runs.rundir import RunDir

_BEGINNING = re.compile(rb'\{"step":(\d+),"row":(\d+),')


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
    for at, row_of_it, line in _lines(rundir):
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


def _lines(rundir: RunDir) -> Iterator[tuple[int, int | None, bytes]]:
    """Yield step, row and JSON of each completion, up to a damaged or unfinished line."""
    path = rundir.path / FILE
    if not path.exists():  # of an earlier version, or none yet
        for one in completions.read(rundir):
            yield one["step"], one["row"], orjson.dumps(one)
        return
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            if known := _BEGINNING.match(line):
                yield int(known[1]), int(known[2]), line
                continue
            if (parsed := _parsed(line)) is None:
                return
            yield parsed["step"], parsed.get("row"), line


def _has(line: bytes, text: str) -> bool:
    return not text or text in ((_parsed(line) or {}).get("completion") or "").casefold()


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None for one that a crash has damaged."""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
