"""Decode steps of fixed shapes for a GPU, replayed as CUDA graphs.

A GPU computes a token of a small model in less time than Python takes to launch its hundreds of
kernels. So decoding sequences share one KV buffer, one slot each, and everything that differs
between steps is a tensor: tokens, positions, and the attention mask that follows from them. The
number of slots and the attended length are rounded up to powers of two; each such shape is captured
once (`cuda_graphs.py`).

The step itself is plain PyTorch, and is tested on a CPU against the decoder's own pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional

from ..compute.device import free_bytes
from ..compute.shape import Shape
from .cuda_graphs import Graphs
from .kv_cache import KVCache
from .parts import Attend, Part
from .rope import Rope

Pass = Callable[[Sequence[Any]], torch.Tensor]  # over parts, as Decoder.forward

SHORTEST = 256  # attended positions: fewer would gain nothing
_MEMORY_SHARE = 0.2  # of the initially free memory; beyond it, the decoder's own pass is used


class Model(Protocol):
    """The interface of a decoder that these steps need."""

    @property
    def shape(self) -> Shape:
        """The sizes of its attention."""

    @property
    def embedding(self) -> torch.Tensor:
        """(V, hidden)."""

    @property
    def rope(self) -> Rope:
        """Its rotary positions."""

    def new(self, capacity: int) -> KVCache:
        """Return an empty KV cache for at most that many positions."""

    def num_bytes(self, capacity: int) -> int:
        """The memory of a sequence of that many positions."""

    def hidden(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """All layers. x: (rows, hidden); cos, sin: (rows, 1, head_dim)."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of rows (rows, hidden) after the last layer: (rows, V)."""


@dataclass
class _Slot:
    """The sequence of a slot; it may have been freed meanwhile."""

    kv: weakref.ref[KVCache]
    begin: int  # positions before it are also in the sequence's own KV cache


class KVSlots:
    """KV buffer of decoding sequences, in slots 0, 1, … without a gap."""

    def __init__(self, decoder: Model, max_bytes: int) -> None:
        self._decoder = decoder
        self.max_bytes = max_bytes
        # (layers, keys and values, rows, heads, positions, size)
        like = decoder.new(0).data
        layers, two, heads, _, size = like.shape
        self.data = like.new_empty(layers, two, 0, heads, 0, size)
        self._slots: list[_Slot] = []

    def assign(self, sequences: Sequence[KVCache]) -> list[int] | None:
        """Return the slots of sequences and release all others; None if there is no room."""
        longest = max(kv.length for kv in sequences) + 1
        if not self._reserve(len(sequences), longest):
            self.keep([])
            return None
        self.keep(sequences)
        rows = self._rows()
        for kv in sequences:
            if id(kv) not in rows:
                rows[id(kv)] = len(self._slots)
                self._attach(kv)
        return [rows[id(kv)] for kv in sequences]

    def keep(self, sequences: Sequence[KVCache]) -> None:
        """Release all other sequences."""
        kept = {id(kv) for kv in sequences}
        for row in reversed(range(len(self._slots))):
            kv = self._slots[row].kv()
            if kv is None or id(kv) not in kept:
                self._detach(row)

    def release(self, kv: KVCache) -> None:
        """Release a sequence, if it has a slot: copy all of it back to its own KV cache."""
        row = self._rows().get(id(kv))
        if row is not None:
            self._detach(row)

    def _rows(self) -> dict[int, int]:
        alive = ((seat.kv(), row) for row, seat in enumerate(self._slots))
        return {id(kv): row for kv, row in alive if kv is not None}

    def _attach(self, kv: KVCache) -> None:
        row, length = len(self._slots), kv.length
        self.data[:, :, row, :, :length].copy_(kv.data[:, :, :, :length])
        # An earlier sequence may have left NaN, which a mask does not hide: 0 x NaN is NaN.
        self.data[:, :, row, :, length:].zero_()
        self._slots.append(_Slot(weakref.ref(kv), length))

    def _detach(self, row: int) -> None:
        """Free a slot and move the last one there."""
        seat = self._slots[row]
        kv = seat.kv()
        if kv is not None:
            new = slice(seat.begin, kv.length)
            kv.data[:, :, :, new].copy_(self.data[:, :, row, :, new])
        last = self._slots.pop()
        if last is not seat:
            self.data[:, :, row].copy_(self.data[:, :, len(self._slots)])
            self._slots[row] = last

    def _reserve(self, rows: int, length: int) -> bool:
        has_rows, has_length = self.data.shape[2], self.data.shape[4]
        if rows <= has_rows and length <= has_length:
            return True
        rows, length = max(rounded(rows), has_rows), max(rounded(length, SHORTEST), has_length)
        if rows * self._decoder.num_bytes(length) > self.max_bytes:
            return False
        layers, two, _, heads, _, size = self.data.shape
        grown = self.data.new_zeros(layers, two, rows, heads, length, size)
        grown[:, :, :has_rows, :, :has_length].copy_(self.data)
        self.data = grown
        return True


class CudaSteps:
    """Decode steps of a changing set of sequences."""

    def __init__(self, decoder: Model, *, max_bytes: int | None = None) -> None:
        """`max_bytes`: of the KV buffer."""
        device = decoder.embedding.device
        if max_bytes is None:
            max_bytes = int(free_bytes(device) * _MEMORY_SHARE)
        # Weak: the decoder holds these steps, and a cycle would delay freeing a closed engine.
        self._decoder: Model = weakref.proxy(decoder)
        self._rows = KVSlots(self._decoder, max_bytes)
        self._graphs = Graphs() if device.type == "cuda" else None
        # (3, slots): tokens, cache positions, RoPE positions.
        self._inputs = torch.zeros(3, 0, dtype=torch.int64, device=device)
        self._cos, self._sin = decoder.rope.tables(0)
        self._computed_in: torch.Tensor | None = None  # the buffer that was captured

    def release(self, kv: KVCache) -> None:
        """Copy all of a sequence back to its own KV cache."""
        self._rows.release(kv)

    def forward(self, parts: Sequence[Part], otherwise: Pass) -> torch.Tensor:
        """Compute parts as Decoder.forward does; parts that are no step by `otherwise`."""
        writing = [part for part in parts if _is_step(part)]
        rows = self._rows.assign([part.kv for part in writing]) if writing else None
        if rows is None:
            self._rows.keep([])
            return otherwise(parts)
        logits = self._step(writing, rows)
        others = [part for part in parts if not _is_step(part)]
        if not others:
            return logits
        of_others = otherwise(others)
        if not len(of_others):
            return logits
        first, row = {}, 0  # row of each part among those computed
        for part in [*writing, *others]:
            first[id(part)] = row
            row += part.num_logits
        order = [first[id(part)] + i for part in parts for i in range(part.num_logits)]
        return torch.cat([logits, of_others])[torch.tensor(order, device=logits.device)]

    def _step(self, parts: Sequence[Part], rows: Sequence[int]) -> torch.Tensor:
        """Compute one token of each part; return logits (parts, V)."""
        self._grow()
        shape = (rounded(len(parts)), rounded(max(p.kv.length for p in parts) + 1, SHORTEST))
        inputs = [(0, 0, 0)] * shape[0]  # unused slots compute token 0
        for row, part in zip(rows, parts, strict=True):
            inputs[row] = (part.ids[0], part.kv.length, part.kv.length + part.offset)
        self._inputs[:, : shape[0]].copy_(torch.tensor(inputs).T)
        if self._graphs is None:
            logits = self._compute(*shape)
        else:
            logits = self._graphs.run(shape, lambda: self._compute(*shape))
        for part in parts:
            part.kv.length += 1
        # A copy: the next replay overwrites the graph's output.
        return logits[torch.tensor(rows, device=logits.device)]

    def _grow(self) -> None:
        """Resize inputs and tables to the buffer; drop graphs that were captured on another one."""
        data = self._rows.data
        if data is self._computed_in:
            return
        self._computed_in = data
        self._inputs = self._inputs.new_zeros(3, data.shape[2])
        # Kept here: the decoder replaces its tables when they grow.
        self._cos, self._sin = self._decoder.rope.tables(data.shape[4])
        if self._graphs is not None:
            self._graphs.clear()

    def _compute(self, rows: int, length: int) -> torch.Tensor:
        """Compute one token of the first `rows` slots, attending to `length` positions: (rows, V).

        No value is read from the device, so that it can be captured.
        """
        decoder, data = self._decoder, self._rows.data
        tokens, positions, places = self._inputs[:, :rows]
        x = decoder.embedding[tokens]
        is_later = torch.arange(length, device=x.device) > positions[:, None]
        mask = x.new_zeros(rows, length).masked_fill_(is_later, -torch.inf)[:, None, None]
        every = torch.arange(rows, device=x.device)
        shape = decoder.shape
        heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_dim

        def attend(qkv: torch.Tensor, number: int) -> torch.Tensor:
            keys, values = data[number, 0], data[number, 1]
            new = qkv[:, heads:].view(rows, 2, kv_heads, size)
            keys[every, :, positions] = new[:, 0]
            values[every, :, positions] = new[:, 1]
            return functional.scaled_dot_product_attention(
                qkv[:, :heads].view(rows, kv_heads, heads // kv_heads, size),
                keys[:rows, :, :length],
                values[:rows, :, :length],
                attn_mask=mask,
                scale=shape.scale,
            ).reshape(rows, heads, size)

        cos, sin = self._cos[places][:, None], self._sin[places][:, None]
        return decoder.logits(decoder.hidden(x, cos, sin, attend))


def _is_step(part: Part) -> bool:
    """Whether a part is one token of text, which no adapter applies to."""
    is_text = part.positions is None and not part.features
    return len(part.ids) == 1 and part.wants_logits and is_text and part.adapter is None


def rounded(number: int, least: int = 1) -> int:
    """Return the next power of two, at least `least`."""
    return max(least, 1 << (number - 1).bit_length())
