"""Token masking for MLM: a pure function of seed, epoch and example.

A resumed run, or one with another batch order, masks the same tokens, because each example has its
own random numbers: Philox, a counter-based generator (Salmon et al., Parallel random numbers: as
easy as 1, 2, 3, SC 2011), keyed by the seed, at a counter made of epoch and index. Imports no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..codegraph.sequences import IGNORED, Role

MIN_MLM, MIN_MNM = 1, 3  # masked tokens per example, where it has that many candidates

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Masked(NamedTuple):
    """A masked example: three arrays (T,) int64."""

    ids: Array  # with masks applied
    mlm_labels: Array  # the true id of masked tokens of the code, IGNORED elsewhere
    mnm_labels: Array  # the same for masked tokens of the graph


@dataclass(frozen=True, kw_only=True)
class Masker:
    """Masks tokens. With `is_static`, every epoch has the masks of epoch 0."""

    seed: int
    mask_id: int
    mlm_rate: float = 0.15
    mnm_rate: float = 0.20
    is_static: bool = False
    # The ids of ordinary tokens, for BERT masking (arXiv:1810.04805): 80 % [MASK], 10 % a random
    # token, 10 % unchanged. None: all [MASK].
    random_ids: range | None = None

    def text(self, ids: Array, is_special: Array, *, epoch: int, index: int) -> Masked:
        """Mask an example without a graph: ids (T,) of any integer type, is_special (T,) bool."""
        hidden, mlm_labels = self._hide(ids, ~is_special, self.mlm_rate, MIN_MLM, epoch, index, 0)
        return Masked(hidden, mlm_labels, np.full(len(ids), IGNORED, dtype=np.int64))

    def graph(
        self, ids: Array, rel_ids: Array, role_ids: Array, *, epoch: int, index: int
    ) -> Masked:
        """Mask an example of `chains`: its code for MLM, and its entities and relations for MNM.

        The two draw separately: changing the rate of one does not change the masks of the other.
        """
        is_code = role_ids == Role.CODE
        # Tokens with a relation come after the first [SEP] and are not special.
        is_graph = rel_ids > 0
        hidden, mlm_labels = self._hide(ids, is_code, self.mlm_rate, MIN_MLM, epoch, index, 0)
        hidden, mnm_labels = self._hide(hidden, is_graph, self.mnm_rate, MIN_MNM, epoch, index, 1)
        return Masked(hidden, mlm_labels, mnm_labels)

    def _hide(
        self,
        ids: Array,
        candidates: Array,
        rate: float,
        minimum: int,
        epoch: int,
        index: int,
        purpose: int,
    ) -> tuple[Array, Array]:
        """Return ids with some candidates hidden, and the labels of those."""
        generator = np.random.Philox(
            key=np.array([self.seed % 2**64, purpose], dtype=np.uint64),
            counter=np.array([0, 0, 0 if self.is_static else epoch, index], dtype=np.uint64),
        )
        # From the raw bits, which numpy guarantees not to change: three numbers from 0 to 1 per
        # token, which decide whether it is masked, its kind of replacement, and the random token.
        raw = generator.random_raw(3 * len(ids)).reshape(3, -1)
        chance, fate, which = (raw >> np.uint64(11)) * 2.0**-53
        is_chosen = candidates & (chance < rate)
        if is_chosen.sum() < minimum:
            places = np.flatnonzero(candidates)
            is_chosen[places[np.argsort(chance[places], kind="stable")[:minimum]]] = True
        hidden = ids.astype(np.int64)
        labels = np.where(is_chosen, hidden, IGNORED)
        if self.random_ids is None:
            hidden[is_chosen] = self.mask_id
        else:
            hidden[is_chosen & (fate < 0.8)] = self.mask_id
            is_random = is_chosen & (fate >= 0.9)
            drawn = (which * len(self.random_ids)).astype(np.int64) * self.random_ids.step
            hidden[is_random] = self.random_ids.start + drawn[is_random]
        return hidden, labels
