"""Writing in steps of fixed shapes, for a GPU: what was launched once is replayed as one graph.

A GPU computes a token of a small model in less time than Python takes to launch the hundreds of
kernels for it. So the sequences that write have a row each in one buffer of keys and values, and
everything that differs from token to token is a tensor: tokens, positions, and by them a mask over
the buffer. The number of rows and the length that is looked at are rounded up to powers of two,
and each such pair is captured once (`cuda_graphs.py`).

The step itself is plain torch, and on a CPU it is tested against the decoder's own pass.
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
from .kv_cache import KeyValues
from .parts import Attend, Part
from .rope import Rope

Pass = Callable[[Sequence[Any]], torch.Tensor]  # over parts, as Decoder.forward

SHORTEST = 256  # positions that are looked at: fewer would gain nothing
_MEMORY_SHARE = 0.2  # of what is free at first: more takes the decoder's own pass


class Model(Protocol):
    """What these steps need of a decoder."""

    @property
    def shape(self) -> Shape:
        """The sizes of its attention."""

    @property
    def embedding(self) -> torch.Tensor:
        """(V, hidden)."""

    @property
    def rope(self) -> Rope:
        """Its rotary positions."""

    def new(self, capacity: int) -> KeyValues:
        """Return room for a sequence of at most so many positions."""

    def num_bytes(self, capacity: int) -> int:
        """The memory of a sequence of that many positions."""

    def hidden(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """All layers. x: (rows, hidden); cos, sin: (rows, 1, head_dim)."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of rows (rows, hidden) after the last layer: (rows, V)."""


@dataclass
class _Seat:
    """The row of a sequence; it may be gone."""

    kv: weakref.ref[KeyValues]
    begin: int  # positions before are in the sequence's own memory, too


class Rows:
    """Keys and values of sequences that write, side by side: rows 0, 1, … without a gap."""

    def __init__(self, decoder: Model, most_bytes: int) -> None:
        self._decoder = decoder
        self.most_bytes = most_bytes
        # (layers, keys and values, rows, heads, positions, size)
        like = decoder.new(0).data
        layers, two, heads, _, size = like.shape
        self.data = like.new_empty(layers, two, 0, heads, 0, size)
        self._seats: list[_Seat] = []

    def seat(self, sequences: Sequence[KeyValues]) -> list[int] | None:
        """Return the rows of sequences, and let all others go; None when there is no room."""
        longest = max(kv.length for kv in sequences) + 1
        if not self._reserve(len(sequences), longest):
            self.keep([])
            return None
        self.keep(sequences)
        rows = self._rows()
        for kv in sequences:
            if id(kv) not in rows:
                rows[id(kv)] = len(self._seats)
                self._sit_down(kv)
        return [rows[id(kv)] for kv in sequences]

    def keep(self, sequences: Sequence[KeyValues]) -> None:
        """Let all others go."""
        kept = {id(kv) for kv in sequences}
        for row in reversed(range(len(self._seats))):
            kv = self._seats[row].kv()
            if kv is None or id(kv) not in kept:
                self._stand_up(row)

    def release(self, kv: KeyValues) -> None:
        """Let one go, if it has a row: its own memory has all of it again."""
        row = self._rows().get(id(kv))
        if row is not None:
            self._stand_up(row)

    def _rows(self) -> dict[int, int]:
        alive = ((seat.kv(), row) for row, seat in enumerate(self._seats))
        return {id(kv): row for kv, row in alive if kv is not None}

    def _sit_down(self, kv: KeyValues) -> None:
        row, length = len(self._seats), kv.length
        self.data[:, :, row, :, :length].copy_(kv.data[:, :, :, :length])
        # Who sat here before may have left NaN, which a mask does not hide: 0 x NaN is NaN.
        self.data[:, :, row, :, length:].zero_()
        self._seats.append(_Seat(weakref.ref(kv), length))

    def _stand_up(self, row: int) -> None:
        """Free a row; the last one moves there."""
        seat = self._seats[row]
        kv = seat.kv()
        if kv is not None:
            new = slice(seat.begin, kv.length)
            kv.data[:, :, :, new].copy_(self.data[:, :, row, :, new])
        last = self._seats.pop()
        if last is not seat:
            self.data[:, :, row].copy_(self.data[:, :, len(self._seats)])
            self._seats[row] = last

    def _reserve(self, rows: int, length: int) -> bool:
        has_rows, has_length = self.data.shape[2], self.data.shape[4]
        if rows <= has_rows and length <= has_length:
            return True
        rows, length = max(rounded(rows), has_rows), max(rounded(length, SHORTEST), has_length)
        if rows * self._decoder.num_bytes(length) > self.most_bytes:
            return False
        layers, two, _, heads, _, size = self.data.shape
        grown = self.data.new_zeros(layers, two, rows, heads, length, size)
        grown[:, :, :has_rows, :, :has_length].copy_(self.data)
        self.data = grown
        return True


class FixedSteps:
    """Computes the next token of many sequences at once, whoever joins and leaves."""

    def __init__(self, decoder: Model, *, most_bytes: int | None = None) -> None:
        """`most_bytes`: for the keys and values of those that write."""
        device = decoder.embedding.device
        if most_bytes is None:
            most_bytes = int(free_bytes(device) * _MEMORY_SHARE)
        # The decoder has these steps: a circle would keep a closed engine's memory.
        self._decoder: Model = weakref.proxy(decoder)
        self._rows = Rows(self._decoder, most_bytes)
        self._graphs = Graphs() if device.type == "cuda" else None
        # The tokens, where their keys and values come to, and their rotary positions.
        self._inputs = torch.zeros(3, 0, dtype=torch.int64, device=device)
        self._cos, self._sin = decoder.rope.tables(0)
        self._computed_in: torch.Tensor | None = None  # the buffer that graphs know

    def release(self, kv: KeyValues) -> None:
        """Put all of a sequence into its own memory, for whoever looks there."""
        self._rows.release(kv)

    def forward(self, parts: Sequence[Part], otherwise: Pass) -> torch.Tensor:
        """Compute parts as Decoder.forward does; those that are not one token by `otherwise`."""
        writing = [part for part in parts if _is_one_token(part)]
        rows = self._rows.seat([part.kv for part in writing]) if writing else None
        if rows is None:
            self._rows.keep([])
            return otherwise(parts)
        logits = self._step(writing, rows)
        others = [part for part in parts if not _is_one_token(part)]
        if not others:
            return logits
        of_others = otherwise(others)
        if not len(of_others):
            return logits
        wanting = [part for part in [*writing, *others] if part.wants_logits]
        place = {id(part): number for number, part in enumerate(wanting)}
        order = [place[id(part)] for part in parts if part.wants_logits]
        return torch.cat([logits, of_others])[torch.tensor(order, device=logits.device)]

    def _step(self, parts: Sequence[Part], rows: Sequence[int]) -> torch.Tensor:
        """Compute one token of each part: (parts, V)."""
        self._grow()
        shape = (rounded(len(parts)), rounded(max(p.kv.length for p in parts) + 1, SHORTEST))
        inputs = [(0, 0, 0)] * shape[0]  # of rows that nobody has, too
        for row, part in zip(rows, parts, strict=True):
            inputs[row] = (part.ids[0], part.kv.length, part.kv.length + part.offset)
        self._inputs[:, : shape[0]].copy_(torch.tensor(inputs).T)
        if self._graphs is None:
            logits = self._compute(*shape)
        else:
            logits = self._graphs.run(shape, lambda: self._compute(*shape))
        for part in parts:
            part.kv.length += 1
        # A copy: the next step writes into what a graph returns.
        return logits[torch.tensor(rows, device=logits.device)]

    def _grow(self) -> None:
        """Make everything else as large as the buffer, and forget what was captured before."""
        data = self._rows.data
        if data is self._computed_in:
            return
        self._computed_in = data
        self._inputs = self._inputs.new_zeros(3, data.shape[2])
        # Tables of their own: those of the decoder are replaced when they grow.
        self._cos, self._sin = self._decoder.rope.tables(data.shape[4])
        if self._graphs is not None:
            self._graphs.clear()

    def _compute(self, rows: int, length: int) -> torch.Tensor:
        """One token of each of the first rows, which see positions up to `length`: (rows, V).

        Nothing here asks the device for a number, and nothing depends on one: it can be captured.
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


def _is_one_token(part: Part) -> bool:
    return len(part.ids) == 1 and part.wants_logits and part.places is None and not part.seen


def rounded(number: int, least: int = 1) -> int:
    """The next power of two, and no less than `least`."""
    return max(least, 1 << (number - 1).bit_length())
