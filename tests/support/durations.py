"""The durations of long tests, measured in earlier runs: the order of files follows from them.

`pytest --record-durations` renews the entries of the tests that it runs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILE = TESTS / "durations.json"  # seconds by test, where more than a second
_SHORTEST_S = 1.0
_USUAL_S = 0.1  # of a test that is shorter, on average


def sort_by_file(items: list[pytest.Item]) -> None:
    """Order tests by the total duration of their file, the longest first; keep a file's order.

    The order of files does not depend on the order in which they were collected.
    """
    known = _read()
    totals: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        totals[item.path] += known.get(_name(item.nodeid), _USUAL_S)
    items.sort(key=lambda item: (-totals[item.path], item.path))


class Recorder:
    """A plugin of pytest that writes the durations of the tests of a run."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the time of a phase: set-up, call or teardown."""
        name = _name(report.nodeid)
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        """Replace the entries of the tests that ran; others stay while their file does."""
        others = {name: s for name, s in _read().items() if name not in self._seconds}
        kept = {name: s for name, s in others.items() if (TESTS / name.split("::")[0]).exists()}
        found = {name: round(s, 1) for name, s in self._seconds.items() if s >= _SHORTEST_S}
        FILE.write_text(json.dumps(dict(sorted({**kept, **found}.items())), indent=0) + "\n")


def _name(node_id: str) -> str:
    """The name of a test in the file: its node id below tests/."""
    return node_id.removeprefix("tests/")


def _read() -> dict[str, float]:
    known: dict[str, float] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return known
