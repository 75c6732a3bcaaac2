"""Masks: how many, where, and that they depend on nothing but seed, epoch and index."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from warmd.jobs.codegraph.sequences import IGNORED, MASK_ID, Role
from warmd.jobs.mlm.masking import Masker

MASKER = Masker(seed=7, mask_id=MASK_ID)


def roles(*counts: int):
    """Roles and relations of a sequence of so many special, code, entity and relation tokens."""
    role_ids = np.repeat(list(Role), counts).astype(np.int32)
    rel_ids = np.where(role_ids >= Role.ENTITY, 5, 0).astype(np.int32)
    ids = (np.arange(len(role_ids)) + 10).astype(np.int32)
    return ids, rel_ids, role_ids


def share(labels) -> float:
    return float((labels != IGNORED).mean())


def test_fifteen_percent_of_code_and_twenty_of_graph_tokens_are_masked():
    ids, rel_ids, role_ids = roles(100, 20_000, 10_000, 10_000)
    masked = MASKER.graph(ids, rel_ids, role_ids, epoch=0, index=0)
    assert share(masked.mlm_labels[role_ids == Role.CODE]) == pytest.approx(0.15, abs=0.01)
    assert share(masked.mnm_labels[rel_ids > 0]) == pytest.approx(0.20, abs=0.01)
    assert share(masked.mlm_labels[role_ids != Role.CODE]) == 0
    assert share(masked.mnm_labels[rel_ids == 0]) == 0


def test_rates_can_be_chosen():
    masker = Masker(seed=7, mask_id=MASK_ID, mlm_rate=0.5, mnm_rate=0.0)
    masked = masker.graph(*roles(2, 10_000, 9, 1), epoch=0, index=0)
    assert share(masked.mlm_labels) == pytest.approx(0.5, abs=0.02)
    assert (masked.mnm_labels != IGNORED).sum() == 3  # the minimum


@given(
    counts=st.tuples(*[st.integers(0, 8)] * 4),
    seed=st.integers(),
    epoch=st.integers(0, 2**40),
    index=st.integers(0, 2**40),
)
def test_at_least_one_code_token_and_three_graph_tokens_are_masked(counts, seed, epoch, index):
    ids, rel_ids, role_ids = roles(*counts)
    masker = Masker(seed=seed, mask_id=MASK_ID)
    masked = masker.graph(ids, rel_ids, role_ids, epoch=epoch, index=index)
    is_mlm, is_mnm = masked.mlm_labels != IGNORED, masked.mnm_labels != IGNORED
    assert is_mlm.sum() >= min(1, counts[1])
    assert is_mnm.sum() >= min(3, counts[2] + counts[3])
    assert not (is_mlm & (role_ids != Role.CODE)).any()
    assert not (is_mnm & (rel_ids == 0)).any()
    is_masked = is_mlm | is_mnm
    assert (masked.ids[is_masked] == MASK_ID).all()
    assert (masked.ids[~is_masked] == ids[~is_masked]).all()
    assert (
        np.where(is_mlm, masked.mlm_labels, masked.mnm_labels)[is_masked] == ids[is_masked]
    ).all()


def test_the_minimum_number_of_masks_is_drawn_uniformly():
    masker = Masker(seed=3, mask_id=MASK_ID, mlm_rate=0.0)
    ids = np.arange(10, 14)
    counts = np.zeros(4)
    for index in range(4000):
        counts += masker.text(ids, ids == 10, epoch=0, index=index).mlm_labels != IGNORED
    assert counts[0] == 0
    np.testing.assert_allclose(counts[1:] / 4000, 1 / 3, atol=0.03)


def test_masks_do_not_depend_on_the_order_of_calls():
    sequence = roles(3, 40, 20, 10)
    places = [(epoch, index) for epoch in range(3) for index in range(20)]
    in_order = {p: MASKER.graph(*sequence, epoch=p[0], index=p[1]) for p in places}
    random.Random(1).shuffle(places)
    np.random.seed(0)
    for place in places:
        again = Masker(seed=7, mask_id=MASK_ID).graph(*sequence, epoch=place[0], index=place[1])
        for first, second in zip(in_order[place], again, strict=True):
            np.testing.assert_array_equal(first, second)


def test_masks_equal_those_of_earlier_versions():
    masked = MASKER.text(np.arange(10, 40), np.zeros(30, dtype=bool), epoch=2, index=5)
    assert np.flatnonzero(masked.mlm_labels != IGNORED).tolist() == [10, 15, 17, 22]


def test_seed_epoch_and_index_each_change_the_masks():
    sequence = roles(3, 400, 0, 0)

    def labels(seed: int, epoch: int, index: int) -> bytes:
        masker = Masker(seed=seed, mask_id=MASK_ID)
        return masker.graph(*sequence, epoch=epoch, index=index).mlm_labels.tobytes()

    assert len({labels(s, e, i) for s in range(3) for e in range(3) for i in range(3)}) == 27


def test_static_masks_stay_while_dynamic_ones_change_with_the_epoch():
    sequence = roles(3, 400, 0, 0)
    static = Masker(seed=7, mask_id=MASK_ID, is_static=True)
    first = MASKER.graph(*sequence, epoch=0, index=4)
    for epoch in (1, 2):
        later = static.graph(*sequence, epoch=epoch, index=4)
        np.testing.assert_array_equal(first.ids, later.ids)
        assert (first.ids != MASKER.graph(*sequence, epoch=epoch, index=4).ids).any()


def test_masks_of_code_do_not_depend_on_the_graph_or_its_rate():
    ids, rel_ids, role_ids = roles(3, 50, 30, 10)
    plain = MASKER.text(ids, role_ids != Role.CODE, epoch=1, index=2)
    rates = Masker(seed=7, mask_id=MASK_ID, mnm_rate=0.9)
    masked = rates.graph(ids, rel_ids, role_ids, epoch=1, index=2)
    np.testing.assert_array_equal(plain.mlm_labels, masked.mlm_labels)
    assert (plain.mnm_labels == IGNORED).all()


def test_eighty_ten_ten():
    masker = Masker(seed=7, mask_id=MASK_ID, mlm_rate=1.0, random_ids=range(100, 200))
    ids = np.full(30_000, 50)
    masked = masker.text(ids, ids == 0, epoch=0, index=0)
    assert (masked.mlm_labels == 50).all()
    drawn = masked.ids[(masked.ids != 50) & (masked.ids != MASK_ID)]
    assert (masked.ids == MASK_ID).mean() == pytest.approx(0.8, abs=0.01)
    assert (masked.ids == 50).mean() == pytest.approx(0.1, abs=0.01)
    assert set(drawn) == set(range(100, 200))


def test_masking_does_not_change_its_input():
    sequence = roles(3, 40, 20, 10)
    before = [array.copy() for array in sequence]
    MASKER.graph(*sequence, epoch=0, index=0)
    for array, copy in zip(sequence, before, strict=True):
        np.testing.assert_array_equal(array, copy)
