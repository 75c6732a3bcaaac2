"""Tokens of a few sequences by `step`, once every layer of a decoder is packed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...products import Int8Linear
from ..linears import Linear, PackedLinear, innermost
from . import plan as p
from .rows import FLOAT
from .step import product, step
from .team import Team
from .vectors import HAS_QUADS, LANES, WIDTH

if TYPE_CHECKING:
    from ..cache import KeyValues
    from ..decoder import Decoder

log = logging.getLogger(__name__)

MOST_ROWS = (
    32  # that are computed in this way: in float32, the products of 48 take oneDNN less time
)

_RUNS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_TRIED_ROWS = 3


class Steps:
    """The steps of one decoder. Their bits are those of its own pass: it is tried at first."""

    def __init__(self, decoder: Decoder, team: Team) -> None:
        self._team = team
        # Whatever a word tells the address of must stay: layers, norms, and this.
        self._layers, self._norm, self._head = decoder.layers, decoder.norm, decoder.head
        self._constants = np.array([decoder.eps, decoder.scale], dtype=np.float32)
        self._hidden = len(decoder.norm)
        self._sizes = (decoder.heads, decoder.kv_heads, decoder.size)
        self._inner = 0
        self._vocabulary = 0
        self._widest = 0  # inputs of a layer
        self._plan: np.ndarray | None = None
        self._ways: dict[tuple[object, ...], int] = {}

    @property
    def is_ready(self) -> bool:
        """Whether it can compute: every layer is packed.

        Raises NotPackedAlike.
        """
        if self._plan is None and all(map(_is_packed, self._linears())):
            self._plan = self._planned()
        return self._plan is not None

    def logits(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        sequences: Sequence[KeyValues],
    ) -> torch.Tensor:
        """Compute the next position of each sequence, whose keys and values are kept: (rows, V).

        x: (rows, hidden), which is overwritten; cos, sin: (rows, 1, size).
        """
        assert self._plan is not None
        rows, threads = len(x), torch.get_num_threads()
        heads, kv_heads, size = self._sizes
        logits = x.new_empty(rows, self._vocabulary)
        of_sequences = np.array(
            [(kv.data.data_ptr(), kv.data.shape[3], kv.length) for kv in sequences], dtype=np.int64
        )
        longest = max(kv.length for kv in sequences) + 1
        private = _room(rows * self._hidden * FLOAT, rows * 2 * WIDTH * FLOAT) + _room(
            rows * WIDTH, max(rows * self._widest, rows * WIDTH * FLOAT, (longest + LANES) * FLOAT)
        )
        shared = [
            rows * width * FLOAT
            for width in ((heads + 2 * kv_heads) * size, heads * size, self._inner)
        ]
        scratch = torch.empty(_room(*shared) + threads * private, dtype=torch.uint8)
        places = np.cumsum([scratch.data_ptr(), *map(_room, shared)]).tolist()
        self._team.run(
            step.address,
            [
                self._team.barrier,
                self._plan.ctypes.data,
                rows,
                x.data_ptr(),
                cos.data_ptr(),
                sin.data_ptr(),
                of_sequences.ctypes.data,
                *places[:3],
                logits.data_ptr(),
                places[3],
                private,
            ],
            threads=threads,
        )
        return logits

    def _linears(self) -> list[Linear]:
        of_layers = (
            linear
            for layer in self._layers
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        return [*of_layers, self._head]

    def _planned(self) -> np.ndarray:
        heads, kv_heads, size = self._sizes
        self._inner = _shape(self._layers[0].down)[1]
        self._vocabulary = _shape(self._head)[0]
        self._widest = max(_shape(linear)[1] for linear in self._linears())
        words = [
            len(self._layers), self._hidden, heads, kv_heads, size, self._inner,
            self._constants.ctypes.data, self._norm.data_ptr(), *self._words_of(self._head),
        ]  # fmt: skip
        for layer in self._layers:
            norms = (layer.attention_norm, layer.mlp_norm, *(layer.head_norms or ()))
            addresses = [norm.data_ptr() for norm in norms]
            words += addresses + [0] * (p.QKV - len(addresses))
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                words += self._words_of(linear)
        return np.array(words, dtype=np.int64)

    def _words_of(self, linear: Linear) -> list[int]:
        """The words of a linear layer that gives the same bits. Raises NotPackedAlike."""
        form = innermost(linear)
        assert isinstance(form, PackedLinear | Int8Linear)
        outputs, inputs = form.shape
        weight = torch.ops.mkldnn.data_ptr(form.packed)
        bias = 0 if form.bias is None else form.bias.data_ptr()
        sizes = (outputs, inputs, bias)
        whole = outputs * inputs
        if isinstance(form, PackedLinear):
            num_bytes, runs = whole * FLOAT, [run for run in _RUNS if run < inputs] + [inputs]
            tried = [[p.FLOATS, weight, *sizes, run, 0, 0] for run in runs]
        else:
            num_bytes = whole + outputs * FLOAT
            scale = form.scale.data_ptr()
            forms = (p.QUADS, p.HALF_QUADS) if HAS_QUADS else ()
            tried = [[form, weight, *sizes, inputs, scale, weight + whole] for form in forms]
        if outputs % WIDTH or inputs % WIDTH or torch.ops.mkldnn._nbytes(form.packed) != num_bytes:
            raise NotPackedAlike(f"{outputs} x {inputs}")
        kind = (type(form), form.shape, bias == 0)
        if kind in self._ways:
            return tried[self._ways[kind]]
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_TRIED_ROWS, inputs, generator=generator)
        expected = torch.cat([linear(row) for row in torch.split(x, 1)])
        for number, words in enumerate(tried):
            if torch.equal(self._product(words, x), expected):
                self._ways[kind] = number
                return words
        raise NotPackedAlike(f"{outputs} x {inputs}")

    def _product(self, words: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        linear = np.array(words, dtype=np.int64)
        rows, inputs = x.shape
        y = x.new_empty(rows, words[p.OUTPUTS])
        scratch = torch.empty(
            _room(rows * WIDTH, max(rows * inputs, rows * WIDTH * FLOAT)), dtype=torch.uint8
        )
        addresses = [linear.ctypes.data, x.data_ptr(), rows, y.data_ptr(), scratch.data_ptr()]
        self._team.run(product.address, addresses, threads=1)
        return y


class NotPackedAlike(Exception):
    """oneDNN packs weights in another order on this machine, or adds up in another."""


def _is_packed(linear: Linear) -> bool:
    return isinstance(innermost(linear), PackedLinear | Int8Linear)


def _shape(linear: Linear) -> tuple[int, int]:
    form = innermost(linear)
    assert isinstance(form, PackedLinear | Int8Linear)
    return form.shape


def _room(*num_bytes: int) -> int:
    """Bytes for all of these, in whole lines of a cache."""
    return sum(-(-count // _LINE) * _LINE for count in num_bytes)


_LINE = 64
