"""Pauses between tries double up to a limit, however many tries there have been."""

from __future__ import annotations

import pytest

from warmd.daemon.host.backoff import backoff_s


@pytest.mark.parametrize(
    ("tries", "pause_s"), [(0, 0.25), (1, 0.5), (5, 8.0), (6, 10.0), (1100, 10.0), (10**6, 10.0)]
)
def test_pauses_double_up_to_the_limit(tries: int, pause_s: float):
    assert backoff_s(tries, first_s=0.25, longest_s=10.0) == pause_s
