"""Requirements of a test on the machine: without them a laptop skips the test, and CI fails it."""

from __future__ import annotations

import os

import pytest


def needs(condition: object, what: str) -> None:
    """Skip the test unless `condition` holds; in CI fail it, naming `what` is missing.

    In CI a skip would go unnoticed, and the test would no longer check anything anywhere.
    """
    if condition:
        return
    if os.environ.get("CI"):
        pytest.fail(f"needs {what}, and CI must have it", pytrace=False)
    # A developer may be unable to install it, and CI runs the test anyway. The exception is a GPU:
    # CI leaves out the tests that are marked `gpu`.
    pytest.skip(f"needs {what}")
