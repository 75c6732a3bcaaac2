"""Parses times of day."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from ...jobs.durations import LONGEST_S, parse_duration
from ...jobs.errors import SpecError


def parse_time(field: str, text: str, *, now: datetime) -> datetime:
    """Return the moment of `18:30` (the next one) or `2026-11-21 18:30`. Raises SpecError.

    Local time unless the text names an offset. `now` has a timezone, and so has the result. When
    clocks are set back, a local time that exists twice is the first; one that does not exist when
    they are set forward is refused.
    """
    try:
        wanted = _next(text, now) or datetime.fromisoformat(text)
        at = wanted.astimezone()
        if wanted.tzinfo is None and _is_skipped(wanted):
            raise SpecError(
                field,
                f"must be a local time that exists, got {text!r}: on {wanted:%Y-%m-%d} clocks are "
                f"set forward, from before to after {wanted:%H:%M}",
            )
        is_to_come = now < at < now + timedelta(seconds=LONGEST_S)
    except (ValueError, OverflowError, OSError):
        is_to_come = False
    if not is_to_come:
        takes = "a time to come like 18:30 or 2026-11-21 18:30"
        raise SpecError(field, f"must be {takes}, got {text!r}")
    return at


def parse_past(field: str, text: str, *, now: datetime) -> datetime:
    """Return the moment of `18:00` (the latest one), `2026-11-21 18:00`, or `12h` ago.

    Local time unless the text names an offset. Raises SpecError.
    """
    try:
        if re.fullmatch(r"\d\d?:\d\d", text, re.ASCII):
            return _latest(text, now)
        if re.fullmatch(r"(?:[\d.]+[smhd])+", text, re.ASCII):
            return now - timedelta(seconds=parse_duration(field, text))
        at = datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError, OSError):
        at = now + timedelta(days=1)
    if at > now:
        takes = "a past time like 18:00 or 2026-11-21 18:00, or an age like 12h"
        raise SpecError(field, f"must be {takes}, got {text!r}")
    return at


def _latest(text: str, now: datetime) -> datetime:
    """The latest occurrence of a time of day. Raises ValueError."""
    hour, minute = map(int, text.split(":"))
    today = now.astimezone().replace(hour=hour, minute=minute, second=0, microsecond=0, tzinfo=None)
    at = today.astimezone()
    return at if at <= now else (today - timedelta(days=1)).astimezone()


def _is_skipped(local: datetime) -> bool:
    """Whether the clocks of this timezone never show a local time."""
    return local.astimezone(UTC).astimezone().replace(tzinfo=None) != local


def _next(text: str, now: datetime) -> datetime | None:
    """The next occurrence of a time of day in local time, or None when `text` is not one."""
    if not re.fullmatch(r"\d\d?:\d\d", text, re.ASCII):
        return None
    hour, minute = map(int, text.split(":"))
    # Computed in local time: tomorrow's UTC offset may differ (daylight saving).
    today = now.astimezone().replace(hour=hour, minute=minute, second=0, microsecond=0, tzinfo=None)
    return today if today.astimezone() > now else today + timedelta(days=1)
