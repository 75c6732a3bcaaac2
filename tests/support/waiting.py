"""Waiting in tests: on a condition, with a deadline, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], *, timeout_s: float = 30.0) -> Any:
    """Return the condition's first true value; fail with its last one after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not so after {timeout_s:g} s; last seen: {value!r}")
        time.sleep(0.01)
