"""What a test needs of the machine: a laptop without it skips the test, CI may not."""

from __future__ import annotations

import os

import pytest


def needs(condition: object, what: str) -> None:
    """Go on where `condition` holds; otherwise skip with `what` is missing, and fail in CI.

    A skip in CI would be a claim that nobody checks any more, and that nobody misses.
    """
    if condition:
        return
    if os.environ.get("CI"):
        pytest.fail(f"needs {what}, and CI must have it", pytrace=False)
    # Whoever works on a machine without it cannot mend that, and CI checks the claim for them
    # (but of a GPU: what is marked `gpu` is left out there).
    pytest.skip(f"needs {what}")
