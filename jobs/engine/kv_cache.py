"""Keys and values of sequences, and the memory of prefixes that were computed before."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch

MOST_PREFIXES = 256  # each is compared with every new prompt
CHUNK = 32  # tokens: attention of a prompt is computed chunk by chunk, from position 0 on


class KeyValues:
    """The keys and values of one sequence; `length` positions are filled."""

    def __init__(
        self, *, layers: int, heads: int, size: int, capacity: int, like: torch.Tensor
    ) -> None:
        # Memory that is not touched yet costs nothing on a CPU.
        self.data = like.new_empty(layers, 2, heads, capacity, size)
        # Of each layer: keys and values as they are written, and each as attention reads them.
        self.layers = [(layer, layer[:1], layer[1:]) for layer in self.data]
        self.length = 0
        self.capacity = capacity

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    @property
    def place(self) -> tuple[int, int, int]:
        """Where the data lies, its capacity, and its length: what a fused decode step takes."""
        return self.data.data_ptr(), self.capacity, self.length

    def fill_from(self, other: KeyValues, length: int) -> None:
        """Copy the first positions of another sequence."""
        self.data[:, :, :, :length].copy_(other.data[:, :, :, :length])
        self.length = length


@dataclass(eq=False)
class Prefix:
    """The beginning of a sequence, computed in whole chunks."""

    keys: np.ndarray  # (T,) int64: what each position was computed from
    kv: KeyValues
    used_at: float = field(default_factory=time.monotonic)


class Prefixes:
    """Beginnings of finished sequences, the least recently used go first.

    Only whole chunks of prompts are kept: they are computed in the same way whoever asks, so that
    going on from one gives the very bits that computing it again would. Completions are not: their
    tokens were computed one by one, and a chunk of them differs in the last bits.
    """

    def __init__(self) -> None:
        self._kept: list[Prefix] = []
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, keys: np.ndarray) -> tuple[KeyValues, int] | None:
        """Return what has the most whole chunks in common with `keys`, and their length."""
        best, length = None, 0
        for prefix in self._kept:
            common = _common(prefix.keys, keys) // CHUNK * CHUNK
            if common > length:
                best, length = prefix, common
        if best is None:
            return None
        best.used_at = time.monotonic()
        return best.kv, length

    def has(self, keys: np.ndarray) -> bool:
        """Whether all of a beginning is kept already."""
        for prefix in self._kept:
            if _common(prefix.keys, keys) == len(keys):
                prefix.used_at = time.monotonic()
                return True
        return False

    def make_way(self, keys: np.ndarray, num_bytes: int) -> None:
        """Drop those that a beginning goes on from, and then others until the rest fits."""
        for prefix in list(self._kept):
            if _common(prefix.keys, keys) == len(prefix.keys):
                self._drop(prefix)
        self.shrink_to(num_bytes)

    def keep(self, keys: np.ndarray, kv: KeyValues) -> None:
        """Keep a beginning, for which way was made; `keys` of all of `kv`."""
        self._kept.append(Prefix(keys, kv))
        self.num_bytes += kv.num_bytes
        if len(self._kept) > MOST_PREFIXES:
            self._drop_oldest()

    def shrink_to(self, num_bytes: int) -> None:
        """Drop what was not used for longest until the rest fits."""
        while self._kept and self.num_bytes > num_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._drop(min(self._kept, key=lambda prefix: prefix.used_at))

    def _drop(self, prefix: Prefix) -> None:
        self._kept.remove(prefix)
        self.num_bytes -= prefix.kv.num_bytes


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """The number of leading elements that two arrays share."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length
