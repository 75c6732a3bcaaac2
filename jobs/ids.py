"""Ids of jobs: `grpo-20261121-184200-x7f2`, the kind, the time in UTC and four letters.

Ids sort by time, independent of time zones and daylight saving, and are safe in paths and keys.
"""

from __future__ import annotations

import re
import threading
import time
from datetime import UTC, datetime

_ID = re.compile(r"[a-z][a-z0-9]{0,15}-\d{8}-\d{6}-[a-z0-9]{4}")
_ID_PREFIX = re.compile(r"[a-z0-9-]{1,40}")
_LETTERS = "23456789abcdefghjkmnpqrstuvwxyz"  # without similar ones, in sorting order
_SLOTS = len(_LETTERS) ** 4  # per second


def is_job_id(text: str) -> bool:
    """Whether the text is a valid job id, which is safe in paths and keys."""
    return _ID.fullmatch(text) is not None


def is_id_prefix(text: str) -> bool:
    """Whether some job id could begin with the text."""
    return _ID_PREFIX.fullmatch(text) is not None


def kind_of(job_id: str) -> str:
    """Return the kind in a job id, or in the id of a sweep or curriculum."""
    return job_id.partition("-")[0]


def by_time(job_id: str) -> str:
    """Return the sort key of job ids: the time, which follows the kind in an id."""
    return job_id.partition("-")[2]


def new_id(kind: str, slot: int) -> str:
    """Return the id for a time slot since 1970: `grpo-20261121-184200-x7f2`, in UTC.

    Ids sort by time, independent of time zones and daylight saving.
    """
    second, rest = divmod(slot, _SLOTS)
    suffix = ""
    for _ in range(4):
        rest, letter = divmod(rest, len(_LETTERS))
        suffix = _LETTERS[letter] + suffix
    return f"{kind}-{datetime.fromtimestamp(second, UTC):%Y%m%d-%H%M%S}-{suffix}"


class _Slots:
    """Unique and increasing time slots, also if the clock is set back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest = 0

    def take(self) -> int:
        with self._lock:
            now = time.time_ns() * _SLOTS // 1_000_000_000
            self._latest = max(now, self._latest + 1)
            return self._latest


_slots = _Slots()


def fresh_id(kind: str) -> str:
    """Return an id that this process has not used yet, for a job that is created later."""
    return new_id(kind, _slots.take())
