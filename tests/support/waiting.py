"""Waiting in tests: for a condition, with a deadline; for an absence, as long as it must last."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], *, timeout_s: float = 30.0) -> Any:
    """Return the condition's first true value; fail with its last one after `timeout_s`.

    It is asked less often where the answer takes long: what it waits for needs the processors.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        asked = time.monotonic()
        value = condition()
        if value:
            return value
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"not so after {timeout_s:g} s; last seen: {value!r}")
        time.sleep(min(max(0.01, 2 * (now - asked)), 0.1))


def holds_for(seconds: float, condition: Callable[[], Any]) -> None:
    """Fail as soon as a condition is false; return when it has held for this time.

    For claims that something does not happen: only a time can show them.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        assert value, f"no longer so: {value!r}"
        time.sleep(0.05)
