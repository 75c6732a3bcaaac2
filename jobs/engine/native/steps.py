"""Tokens of a few sequences by `step`, and products of more rows, once every layer is packed."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...products import Bfloat16Linear, Int8Linear
from ..linears import Linear, Packed, innermost
from . import plan as p
from .linear import product
from .rows import FLOAT
from .step import step
from .team import Team, address
from .vectors import HAS_PAIRS, HAS_QUADS, LANES, LINE, WIDTH

if TYPE_CHECKING:
    from ..cache import KeyValues
    from ..decoder import Decoder

log = logging.getLogger(__name__)

# Up to so many rows this was measured to take less time than oneDNN's products.
MOST_ROWS = 64  # of a step
MOST_PRODUCT_ROWS = 512

_RUNS = (4096, 3072, 2048, 1536, 1024, 768, 512, 384, 256, 128, 64)
_TRIED_ROWS = 4
_TRIED_OUTPUTS = 16 * WIDTH
_TELLING = 4096  # inputs of rows that tell orders apart: of shorter ones it takes more
_LARGE = 4096.0  # so that a bias is small beside it


class Steps:
    """The steps and products of one decoder, once it is packed.

    Their bits are those of its own pass by PyTorch: it is tried at first.
    """

    def __init__(self, decoder: Decoder, team: Team) -> None:
        self._team = team
        # Whatever a word tells the address of must stay: layers, norms, and this.
        self._layers, self._norm, self._head = decoder.layers, decoder.norm, decoder.head
        self._linears = decoder.linears
        self._constants = np.array([decoder.eps, decoder.scale], dtype=np.float32)
        self._hidden = len(decoder.norm)
        self._sizes = (decoder.heads, decoder.kv_heads, decoder.size)
        self._inner = 0
        self._vocabulary = 0
        self._widest = 0  # inputs of a layer
        self._biases: list[torch.Tensor] = []  # as float32
        self._num_packed = 0  # of the first layers
        self._plan: np.ndarray | None = None
        self._words: dict[Linear, np.ndarray] = {}
        self._ways: dict[tuple[object, ...], int] = {}

    @property
    def is_ready(self) -> bool:
        """Whether it can compute: every layer is packed.

        Raises NotPackedAlike.
        """
        if self._plan is None:
            linears = self._linears
            while self._num_packed < len(linears) and _is_packed(linears[self._num_packed]):
                self._num_packed += 1  # they are packed in their order; asked at every product
            if self._num_packed == len(linears):
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
            [(address(kv.data), kv.capacity, kv.length) for kv in sequences], dtype=np.int64
        )
        longest = max(kv.length for kv in sequences) + 1
        private = _room(rows * self._hidden * FLOAT, rows * 2 * WIDTH * FLOAT) + _room(
            rows * WIDTH, max(rows * (2 * self._widest + WIDTH * FLOAT), (longest + LANES) * FLOAT)
        )
        shared = [
            rows * width * FLOAT
            for width in ((heads + 2 * kv_heads) * size, heads * size, self._inner)
        ]
        scratch = torch.empty(_room(*shared) + threads * private, dtype=torch.uint8)
        taken = np.zeros((p.PHASES * len(self._layers) + 1) * threads, dtype=np.int64)
        places = np.cumsum([scratch.data_ptr(), *map(_room, shared)]).tolist()
        self._team.run(
            step.address,
            [
                self._team.barrier,
                self._plan.ctypes.data,
                rows,
                address(x),
                address(cos),
                address(sin),
                of_sequences.ctypes.data,
                *places[:3],
                address(logits),
                places[3],
                private,
                taken.ctypes.data,
            ],
            threads=threads,
        )
        return logits

    def product(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Compute a layer's outputs (rows, outputs) of x (rows, inputs)."""
        return self._product(self._words[linear], x, threads=torch.get_num_threads())

    def _planned(self) -> np.ndarray:
        heads, kv_heads, size = self._sizes
        self._inner = _shape(self._layers[0].down)[1]
        self._vocabulary = _shape(self._head)[0]
        self._widest = max(_shape(linear)[1] for linear in self._linears)
        if len({(_shape(layer.gate_up), _shape(layer.down)) for layer in self._layers}) > 1:
            raise NotPackedAlike("layers of several sizes")  # the plan has one size for all
        for linear in self._linears:
            self._words[linear] = np.array(self._words_of(linear), dtype=np.int64)
        words = [
            len(self._layers), self._hidden, heads, kv_heads, size, self._inner,
            self._constants.ctypes.data, address(self._norm), *self._words[self._head],
        ]  # fmt: skip
        for layer in self._layers:
            norms = (layer.attention_norm, layer.mlp_norm, *(layer.head_norms or ()))
            addresses = [address(norm) for norm in norms]
            words += addresses + [0] * (p.QKV - len(addresses))
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                words.extend(self._words[linear])
        return np.array(words, dtype=np.int64)

    def _words_of(self, linear: Linear) -> list[int]:
        """The words of a linear layer that gives the same bits. Raises NotPackedAlike."""
        form = innermost(linear)
        assert isinstance(form, Packed)
        outputs, inputs = form.shape
        weight = torch.ops.mkldnn.data_ptr(form.packed)
        bias = 0
        if form.bias is not None:
            self._biases.append(form.bias.float())
            bias = address(self._biases[-1])
        sizes = (outputs, inputs, bias)
        whole = outputs * inputs
        if isinstance(form, Int8Linear):
            num_bytes = whole + outputs * FLOAT
            scale = address(form.scale)
            panels = (WIDTH, WIDTH // 2) if HAS_QUADS else ()
            tried = [
                [p.QUADS, weight, *sizes, inputs, scale, weight + whole, panel] for panel in panels
            ]
        else:
            runs = [inputs, *(run for run in _RUNS if run < inputs)]
            is_half = isinstance(form, Bfloat16Linear)
            num_bytes = whole * (2 if is_half else FLOAT)
            named = p.PAIRS if is_half else p.FLOATS
            can = HAS_PAIRS or not is_half
            tried = [[named, weight, *sizes, run, 0, 0, WIDTH] for run in runs] if can else []
        if outputs % WIDTH or inputs % WIDTH or torch.ops.mkldnn._nbytes(form.packed) != num_bytes:
            raise NotPackedAlike(f"{outputs} x {inputs}")
        ways, kind = tried, (type(form), form.shape, bias == 0)
        if kind in self._ways:
            return ways[self._ways[kind]]
        x = _of_block(weight, inputs) if isinstance(form, Bfloat16Linear) else _any_rows(inputs)
        outputs_of_x = linear(x)
        for most in (_TRIED_OUTPUTS, outputs):  # all, where the first ones do not tell ways apart
            expected = outputs_of_x[:, :most]
            tried = [words for words in tried if self._is_right(words, x, expected)]
            if not tried:
                raise NotPackedAlike(f"{outputs} x {inputs}")
            if len(tried) == 1:
                self._ways[kind] = ways.index(tried[0])
                break
        return tried[0]  # of zeros, whatever way: that says nothing of other layers

    def _is_right(self, words: Sequence[int], x: torch.Tensor, expected: torch.Tensor) -> bool:
        some = np.array(words, dtype=np.int64)
        some[p.OUTPUTS] = expected.shape[1]
        return torch.equal(self._product(some, x, threads=1), expected)

    def _product(self, words: np.ndarray, x: torch.Tensor, *, threads: int) -> torch.Tensor:
        rows, inputs = x.shape
        y = x.new_empty(rows, words[p.OUTPUTS])
        private = _room(rows * WIDTH, rows * (2 * inputs + WIDTH * FLOAT))
        scratch = torch.empty(threads * private, dtype=torch.uint8)
        taken = np.zeros(threads, dtype=np.int64)
        addresses = [
            words.ctypes.data, address(x), rows, address(y), scratch.data_ptr(), private,
            taken.ctypes.data,
        ]  # fmt: skip
        self._team.run(product.address, addresses, threads=threads)
        return y


class NotPackedAlike(Exception):
    """oneDNN packs weights in another order on this machine, or adds up in another."""


def _any_rows(inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_TRIED_ROWS, inputs, generator=generator)


def _of_block(weight: int, inputs: int) -> torch.Tensor:
    """Rows (WIDTH or more, inputs) for a layer in bfloat16 at an address, of which each says much.

    Rounded to bfloat16, sums in different orders are mostly the same. So these are rows whose sum
    for one of the first outputs is far smaller than what is added up.
    """
    generator = torch.Generator().manual_seed(0)
    data = (ctypes.c_int16 * (WIDTH * inputs)).from_address(weight)
    packed = torch.frombuffer(data, dtype=torch.bfloat16).view(inputs // 2, WIDTH, 2)
    of_outputs = packed.transpose(0, 1).reshape(WIDTH, inputs).float()
    of_outputs = of_outputs.repeat(max(1, _TELLING // inputs), 1)
    x = _LARGE * torch.randn(of_outputs.shape, generator=generator)
    share = (x * of_outputs).sum(1, keepdim=True) / of_outputs.square().sum(1, keepdim=True)
    return x - share.nan_to_num() * of_outputs


def _is_packed(linear: Linear) -> bool:
    return isinstance(innermost(linear), Packed)


def _shape(linear: Linear) -> tuple[int, int]:
    form = innermost(linear)
    assert isinstance(form, Packed)
    return form.shape


def _room(*num_bytes: int) -> int:
    """Bytes for all of these, in whole lines of a cache."""
    return sum(-(-count // LINE) * LINE for count in num_bytes)
