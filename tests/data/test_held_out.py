"""The held-out split by position; tests/mlm/test_corpus.py has the split by content."""

from __future__ import annotations

from hypothesis import given, strategies as st

from warmd.jobs.data.held_out import split

COUNTS = st.integers(0, 6)


@given(total=st.integers(0, 12), samples=st.none() | COUNTS, held_out=COUNTS)
def test_the_held_out_items_are_those_after_the_training_items(total, samples, held_out):
    pairs = list(split(range(total), samples, held_out))
    taken = max(total - held_out, 0) if samples is None else samples
    assert pairs == [
        *((item, False) for item in range(min(taken, total))),
        *((item, True) for item in range(taken, min(taken + held_out, total))),
    ]


@given(samples=COUNTS, held_out=COUNTS)
def test_what_follows_the_held_out_items_is_not_read(samples, held_out):
    items = iter(range(100))
    assert len(list(split(items, samples, held_out))) == samples + held_out
    assert next(items) == samples + held_out


@given(total=st.integers(1, 12), held_out=COUNTS)
def test_all_but_the_last_is_the_same_split_as_with_the_number(total, held_out):
    samples = max(total - held_out, 0)
    if samples:
        assert list(split(range(total), None, held_out)) == list(
            split(range(total), samples, held_out)
        )
