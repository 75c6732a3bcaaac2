"""Work stealing between threads."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from warmd.jobs.compute.native.work_stealing import claim


def claimed_in(order: list[int], *, count: int, threads: int) -> list[list[int]]:
    """The tasks of each thread that claims in this order; then all claim round-robin to the end."""
    words = np.zeros(threads, dtype=np.int64)
    found: list[list[int]] = [[] for _ in range(threads)]
    asking = [*order, *(thread for _ in range(count + 1) for thread in range(threads))]
    for thread in asking:
        piece = claim(count, thread, threads, words.ctypes.data)
        if piece >= 0:
            found[thread].append(piece)
    return found


claimed_in([0], count=1, threads=1)  # compiles it, for which no example of Hypothesis has the time


@given(count=st.integers(0, 40), threads=st.integers(1, 9), data=st.data())
def test_every_task_is_claimed_once_in_any_order(count, threads, data):
    order = data.draw(st.lists(st.integers(0, threads - 1), max_size=2 * count))
    found = claimed_in(order, count=count, threads=threads)
    assert sorted(piece for pieces in found for piece in pieces) == list(range(count))


def test_a_thread_claims_its_own_range_first_and_then_steals():
    assert claimed_in([0] * 9, count=9, threads=3) == [[0, 1, 2, 5, 4, 3, 8, 7, 6], [], []]
    assert claimed_in([1, 0, 0, 0, 0], count=6, threads=2) == [[0, 1, 2, 5, 4], [3]]
