"""KV caches of sequences, and the cache of prompt prefixes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch

MAX_PREFIXES = 256  # every new prompt is compared with each
CHUNK = 32  # tokens: prefill attention is computed in chunks on this grid, from position 0 on


class KVCache:
    """The KV cache of one sequence: (layers, 2, kv_heads, capacity, head_dim), `length` filled."""

    def __init__(
        self, *, layers: int, heads: int, size: int, capacity: int, like: torch.Tensor
    ) -> None:
        # Uninitialized: on a CPU, pages that were never written take no memory.
        self.data = like.new_empty(layers, 2, heads, capacity, size)
        # For each layer: (2, heads, capacity, head_dim) to write; keys and values,
        # (1, heads, capacity, head_dim), for attention.
        self.layers = [(layer, layer[:1], layer[1:]) for layer in self.data]
        self.length = 0
        self.capacity = capacity

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    @property
    def location(self) -> tuple[int, int, int]:
        """Address of the data, capacity and length: the input of a fused decode step."""
        return self.data.data_ptr(), self.capacity, self.length

    def copy_prefix(self, other: KVCache, length: int) -> None:
        """Copy the first `length` positions of another sequence's cache."""
        self.data[:, :, :, :length].copy_(other.data[:, :, :, :length])
        self.length = length


@dataclass(eq=False)
class CachedPrefix:
    """A prompt prefix of whole chunks, with its KV cache."""

    keys: np.ndarray  # (T,) int64: see sequence.keys_of
    kv: KVCache
    used_at: float = field(default_factory=time.monotonic)


class PrefixCache:
    """LRU cache of prompt prefixes.

    Only whole chunks of prompts are cached: they are computed in the same way for every request,
    so a prefill that starts from them gives the same bits as a full one. Completions are not
    cached: their tokens were computed one by one, which differs from a chunk in the last bits.
    """

    def __init__(self) -> None:
        self._entries: list[CachedPrefix] = []
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, keys: np.ndarray) -> tuple[KVCache, int] | None:
        """Return the KV cache with the longest common prefix in whole chunks, and its length."""
        best, length = None, 0
        for prefix in self._entries:
            common = _common(prefix.keys, keys) // CHUNK * CHUNK
            if common > length:
                best, length = prefix, common
        if best is None:
            return None
        best.used_at = time.monotonic()
        return best.kv, length

    def has(self, keys: np.ndarray) -> bool:
        """Whether a prefix is cached already, alone or as a part of a longer one."""
        for prefix in self._entries:
            if _common(prefix.keys, keys) == len(keys):
                prefix.used_at = time.monotonic()
                return True
        return False

    def make_room(self, keys: np.ndarray, num_bytes: int) -> None:
        """Evict the prefixes of `keys`, then others (LRU) until at most `num_bytes` are used."""
        for prefix in list(self._entries):
            if _common(prefix.keys, keys) == len(prefix.keys):
                self._evict(prefix)
        self.shrink_to(num_bytes)

    def add(self, keys: np.ndarray, kv: KVCache) -> None:
        """Add a prefix; `keys` are those of all of `kv`. Call `make_room` before."""
        self._entries.append(CachedPrefix(keys, kv))
        self.num_bytes += kv.num_bytes
        if len(self._entries) > MAX_PREFIXES:
            self._evict_oldest()

    def shrink_to(self, num_bytes: int) -> None:
        """Evict the least recently used until at most `num_bytes` are used."""
        while self._entries and self.num_bytes > num_bytes:
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        self._evict(min(self._entries, key=lambda prefix: prefix.used_at))

    def _evict(self, prefix: CachedPrefix) -> None:
        self._entries.remove(prefix)
        self.num_bytes -= prefix.kv.num_bytes


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """The number of leading elements that two arrays share."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length
