"""Fused decode steps: the next tokens of several sequences per native call.

Layers in warmd's panels are used directly. Layers that oneDNN packed are probed: if a native kernel
gives oneDNN's bits on oneDNN's packed weights, both share that memory, and the native kernel
computes small batches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from . import onednn
from .levels import levels
from .linear_forms import InPlaceLinear, Linear, OnednnPacked, panels_of
from .linears import innermost
from .native import layout as p
from .native.decode_step import step
from .native.intrinsics import HAS_AMX, LANES, WIDTH
from .native.linear import DOT_INT8_PANEL
from .native.openmp import OpenMP, address
from .native.panels import (
    K_BLOCKS,
    multiply,
    reads_onednn_bfloat16,
    reads_onednn_int8,
    tiled_words,
    whole_lines,
)
from .native.rowwise import FLOAT
from .quantized import Bfloat16Linear, Int8Linear
from .shape import Shape

_MAX_ROWS = 512  # for layers that oneDNN packed; more rows were not measured
_MAX_TOKENS = 64

_PROBE_ROWS = 4
_PROBE_OUTPUTS = 16 * WIDTH
_PROBE_INPUTS = 4096  # in all probe rows together: enough to distinguish orders of summation
_LARGE = 4096.0  # large compared with a bias


@dataclass(frozen=True)
class FusedLayer:
    """The norms and linear layers of one decoder layer. Norms are float32 (hidden,)."""

    norms: Sequence[torch.Tensor]  # before attention, before the MLP; of queries and keys, if any
    linears: Sequence[Linear]  # qkv, out, gate_up, down


class FusedDecodeSteps:
    """Decode steps of one model, and GEMM on the layers that oneDNN packed.

    Bit-identical to the decoder's own forward pass.
    """

    def __init__(
        self,
        shape: Shape,
        layers: Sequence[FusedLayer],
        norm: torch.Tensor,
        head: Linear,
        omp: OpenMP,
    ) -> None:
        """`norm`: (hidden,) float32, before the vocabulary's linear layer `head`.

        A head that stays unpacked leaves only `linear`, without `logits`.
        """
        self._omp = omp
        self._max_rows = min(_MAX_ROWS, levels().max_rows)
        self.max_tokens = _MAX_TOKENS  # of one step; see Levels.tiled_rows
        # Keep the objects alive whose addresses the plan has: layers, norms, constants and biases.
        self._shape, self._layers, self._norm, self._head = shape, layers, norm, head
        self.has_logits = not isinstance(head, InPlaceLinear)
        self._linears = [linear for layer in layers for linear in layer.linears]
        if self.has_logits:
            self._linears.append(head)
        self._constants = np.array([shape.eps, shape.scale], dtype=np.float32)
        self._hidden = len(norm)
        self._inner = 0
        self._widest = 0  # inputs of a layer
        self._biases: list[torch.Tensor] = []  # in float32
        self._num_packed = 0  # leading layers found packed so far
        self._plan: np.ndarray | None = None
        self._words: dict[Linear, np.ndarray] = {}
        self._layouts: dict[tuple[object, ...], int] = {}

    @property
    def is_ready(self) -> bool:
        """Whether every layer is packed, so that the rest can run. Raises LayoutMismatch."""
        if self._plan is None:
            linears = self._linears
            while self._num_packed < len(linears) and _is_packed(linears[self._num_packed]):
                self._num_packed += 1  # cheap at every step: layers are packed in this order
            if self._num_packed == len(linears):
                self._plan = self._build_plan()
        return self._plan is not None

    def logits(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        sequences: Sequence[tuple[int, int, int]],
        counts: Sequence[int],
    ) -> torch.Tensor:
        """Compute the next tokens of each sequence and append to its KV cache.

        Returns logits (rows, V), which have the bits of as many steps of one token each.

        x: (rows, hidden), overwritten; cos, sin: (rows, 1, head_dim); all float32. `sequences`: of
        each the address of its KV cache (layers, 2, kv_heads, capacity, head_dim), its capacity and
        its length; `counts`: its number of rows, which follow one another.
        """
        assert self._plan is not None
        assert self.has_logits
        rows, threads = len(x), torch.get_num_threads()
        heads, kv_heads, size = self._shape.heads, self._shape.kv_heads, self._shape.head_dim
        logits = x.new_empty(rows, _shape(self._head)[0])
        sequence_words = np.zeros((len(sequences), p.SEQUENCE), dtype=np.int64)
        sequence_words[:, : p.FIRST] = sequences
        sequence_words[:, p.FIRST] = np.cumsum([0, *counts[:-1]])
        sequence_words[:, p.COUNT] = counts
        longest = int((sequence_words[:, p.LENGTH] + counts).max())
        private = whole_lines(rows * self._hidden * FLOAT, rows * 2 * WIDTH * FLOAT) + whole_lines(
            rows * WIDTH, max(rows * (2 * self._widest + WIDTH * FLOAT), (longest + LANES) * FLOAT)
        )
        shared = [
            rows * width * FLOAT
            for width in ((heads + 2 * kv_heads) * size, heads * size, self._inner)
        ]
        scratch = torch.empty(whole_lines(*shared) + threads * private, dtype=torch.uint8)
        claimed = np.zeros((p.PHASES * len(self._layers) + 1) * threads, dtype=np.int64)
        places = np.cumsum([scratch.data_ptr(), *map(whole_lines, shared)]).tolist()
        self._omp.run(
            step.address,
            [
                self._omp.barrier,
                self._plan.ctypes.data,
                rows,
                address(x),
                address(cos),
                address(sin),
                sequence_words.ctypes.data,
                *places[:3],
                address(logits),
                places[3],
                private,
                claimed.ctypes.data,
                len(sequences),
            ],
            threads=threads,
        )
        return logits

    def linear(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Apply a linear layer: (rows, in) to (rows, out), float32."""
        form = innermost(linear)
        if panels_of(form) is not None or len(x) > self._max_rows or linear not in self._words:
            return linear(x)
        return multiply(self._words[linear], x, self._omp)

    def _build_plan(self) -> np.ndarray:
        """Return the words of the model, as in `layout`. Raises LayoutMismatch."""
        sizes = {tuple(_shape(linear) for linear in layer.linears[2:]) for layer in self._layers}
        if len(sizes) > 1:
            raise LayoutMismatch("the MLPs differ in size")  # the plan has one size for all
        if any(size % WIDTH for linear in self._linears for size in _shape(linear)):
            raise LayoutMismatch(f"a layer's size is not a multiple of {WIDTH}")
        self._inner = _shape(self._layers[0].linears[3])[1]
        self._widest = max(_shape(linear)[1] for linear in self._linears)
        for linear in self._linears:
            self._words[linear] = np.array(self._words_of(linear), dtype=np.int64)
        if any(words[p.FORM] == p.TILED_BFLOAT16 for words in self._words.values()):
            self._max_rows = min(self._max_rows, levels().tiled_rows)
            self.max_tokens = min(self.max_tokens, levels().tiled_rows)
        shape = self._shape
        words = [
            len(self._layers), self._hidden, shape.heads, shape.kv_heads, shape.head_dim,
            self._inner, self._constants.ctypes.data, address(self._norm),
            *(self._words[self._head] if self.has_logits else [0] * p.LINEAR),
        ]  # fmt: skip
        for layer in self._layers:
            addresses = [address(norm) for norm in layer.norms]
            words += addresses + [0] * (p.QKV - len(addresses))
            for linear in layer.linears:
                words.extend(self._words[linear])
        return np.array(words, dtype=np.int64)

    def _words_of(self, linear: Linear) -> list[int]:
        """Return the words of a native layer with the same bits. Raises LayoutMismatch."""
        form = innermost(linear)
        panels = panels_of(form)
        if panels is not None:
            return list(panels.words)
        assert isinstance(form, OnednnPacked)
        outputs, inputs = form.shape
        weight = onednn.address_of(form.packed)
        bias = 0
        if form.bias is not None:
            self._biases.append(form.bias.float())
            bias = address(self._biases[-1])
        sizes = (outputs, inputs, bias)
        whole = outputs * inputs
        if isinstance(form, Int8Linear):
            num_bytes = whole + outputs * FLOAT
            scale = address(form.scale)
            widths = (DOT_INT8_PANEL, DOT_INT8_PANEL // 2) if reads_onednn_int8() else ()
            candidates = [
                [p.DOT_INT8, weight, *sizes, inputs, scale, weight + whole, width]
                for width in widths
            ]
        else:
            k_blocks = [inputs, *(size for size in K_BLOCKS if size < inputs)]
            is_bfloat16 = isinstance(form, Bfloat16Linear)
            num_bytes = whole * (2 if is_bfloat16 else FLOAT)
            code = p.DOT_BFLOAT16 if is_bfloat16 else p.FLOAT32
            if is_bfloat16 and not reads_onednn_bfloat16():
                k_blocks = []
            candidates = [[code, weight, *sizes, size, 0, 0, WIDTH] for size in k_blocks]
            if is_bfloat16 and HAS_AMX:
                candidates.append(tiled_words(weight, *sizes))
        if onednn.bytes_of(form.packed) != num_bytes:
            raise LayoutMismatch(f"{outputs} x {inputs}")
        key = (type(form), form.shape, bias == 0)
        if key in self._layouts:
            return candidates[self._layouts[key]]
        is_bfloat16 = isinstance(form, Bfloat16Linear)
        x = _canceling_probe(weight, inputs) if is_bfloat16 else _random_probe(inputs)
        y = linear(x)
        matching = candidates
        for count in (_PROBE_OUTPUTS, outputs):  # all outputs if the first do not distinguish
            expected = y[:, :count]
            matching = [words for words in matching if self._matches(words, x, expected)]
            if not matching:
                raise LayoutMismatch(f"{outputs} x {inputs}")
            if len(matching) == 1:
                self._layouts[key] = candidates.index(matching[0])
                break
        return matching[0]  # several match if all weights are 0: not recorded for other layers

    def _matches(self, words: Sequence[int], x: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether a native layer gives exactly the first outputs, `expected`."""
        first = np.array(words, dtype=np.int64)
        first[p.OUTPUTS] = expected.shape[1]
        return torch.equal(multiply(first, x, self._omp, threads=1), expected)


class LayoutMismatch(Exception):
    """Layer sizes are unsupported, or oneDNN packs or sums in an unknown order."""


def _random_probe(inputs: int) -> torch.Tensor:
    """Return probe rows (_PROBE_ROWS, inputs) of random numbers."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_PROBE_ROWS, inputs, generator=generator)


def _canceling_probe(weight: int, inputs: int) -> torch.Tensor:
    """Return probe rows (at least WIDTH, inputs) for packed bfloat16 weights at an address.

    Sums in different orders are mostly equal after rounding to bfloat16. So each probe row is made
    nearly orthogonal to the weights of one output: cancellation makes the order visible.
    """
    generator = torch.Generator().manual_seed(0)
    data = (ctypes.c_int16 * (WIDTH * inputs)).from_address(weight)
    packed = torch.frombuffer(data, dtype=torch.bfloat16).view(inputs // 2, WIDTH, 2)
    weights = packed.transpose(0, 1).reshape(WIDTH, inputs).float()
    weights = weights.repeat(max(1, _PROBE_INPUTS // inputs), 1)
    x = _LARGE * torch.randn(weights.shape, generator=generator)
    share = (x * weights).sum(1, keepdim=True) / weights.square().sum(1, keepdim=True)
    return x - share.nan_to_num() * weights


def _is_packed(linear: Linear) -> bool:
    form = innermost(linear)
    return isinstance(form, OnednnPacked) or panels_of(form) is not None


def _shape(linear: Linear) -> tuple[int, int]:
    form = innermost(linear)
    panels = panels_of(form)
    if panels is not None:
        shape: tuple[int, int] = panels.shape
        return shape
    assert isinstance(form, OnednnPacked)
    return form.shape
