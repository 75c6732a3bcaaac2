"""Linear layers on weights packed in warmd's panels, for tensors: float32, bfloat16 and int8."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from . import layout as p
from .arranging import arrange
from .grouped import GROUPED_INT4, GROUPED_INT8, INPUTS, PANEL as GROUPED_PANEL
from .intrinsics import HAS_AMX, HAS_AVX2, HAS_AVX_VNNI, HAS_BFLOAT16, HAS_VNNI, LINE, WIDTH
from .linear import (
    DOT_INT8_PANEL,
    FLOAT32_PANEL,
    TILED_BFLOAT16_PANEL,
    WIDENED_BFLOAT16_PANEL,
    WIDENED_INT8_PANEL,
    linear_entry,
)
from .openmp import OpenMP, address, openmp
from .rowwise import FLOAT

_LARGEST = 127
_BYTES = {  # of a weight, with its share of the scale of its group
    p.FLOAT32: 4,
    p.WIDENED_BFLOAT16: 2,
    p.DOT_INT8: 1,
    p.WIDENED_INT8: 1,
    p.GROUPED_INT8: GROUPED_INT8.bytes_per_output / INPUTS,
    p.GROUPED_INT4: GROUPED_INT4.bytes_per_output / INPUTS,
}
_INT8 = p.DOT_INT8 if HAS_VNNI or HAS_AVX_VNNI else p.WIDENED_INT8
_PANELS = {
    p.FLOAT32: FLOAT32_PANEL,
    p.WIDENED_BFLOAT16: WIDENED_BFLOAT16_PANEL,
    p.DOT_INT8: DOT_INT8_PANEL,
    p.WIDENED_INT8: WIDENED_INT8_PANEL,
    p.GROUPED_INT8: GROUPED_PANEL,
    p.GROUPED_INT4: GROUPED_PANEL,
}


class PanelLinear:
    """y (..., out) = x W^T + b for x (..., in), batch-invariant; y has the dtype of x.

    Computes in float32 or int8 by `form`. Inputs and outputs are padded to multiples of WIDTH.
    """

    def __init__(
        self,
        form: int,
        weights: Sequence[Tensor],
        bias: Tensor | None,
        *,
        k_block: int | None = None,
    ) -> None:
        """Pack `weights`, (out, in) each, with the same input; their outputs are concatenated.

        `form`: see `layout`. `k_block`: see layout.K_BLOCK; all inputs by default.
        """
        omp = openmp()
        assert omp is not None
        self._omp = omp
        weights = _readable(weights)
        outputs, inputs = sum(map(len, weights)), weights[0].shape[1]
        self.shape: tuple[int, int] = (outputs, inputs)
        rows, columns = _whole(outputs), _whole(inputs)
        self._padded_inputs, self._padded_outputs = columns, rows
        self.packed = torch.empty(int(rows * columns * _BYTES[form]), dtype=torch.uint8)
        self.scale = torch.empty(rows)
        self._sums = torch.empty(rows if form == p.DOT_INT8 else 0, dtype=torch.int32)
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = torch.nn.functional.pad(bias.detach().float(), (0, rows - outputs))
        panel = _PANELS[form]
        self._pack(form, panel, weights)
        sums = self._sums.data_ptr() if form == p.DOT_INT8 else 0
        self.words: np.ndarray = np.array(
            [
                form, self.packed.data_ptr(), rows, columns,
                0 if self.bias is None else address(self.bias), k_block or columns,
                address(self.scale), sums, panel,
            ],
            dtype=np.int64,
        )  # fmt: skip

    def __call__(self, x: Tensor) -> Tensor:
        if x.ndim != 2 or x.dtype != torch.float32:
            y = self(x.reshape(-1, x.shape[-1]).float())
            return y.to(x.dtype).view(*x.shape[:-1], -1)
        outputs, inputs = self.shape
        if inputs < self._padded_inputs:
            x = torch.nn.functional.pad(x, (0, self._padded_inputs - inputs))
        y = multiply(self.words, x.contiguous(), self._omp)
        return y if outputs == self._padded_outputs else y[:, :outputs].contiguous()

    @property
    def panels(self) -> PanelLinear:
        """This layer; see linear_forms.panels_of."""
        return self

    @property
    def num_bytes(self) -> int:
        """The bytes of the packed weights."""
        return self.packed.numel()

    def _pack(self, form: int, panel: int, weights: Sequence[Tensor]) -> None:
        threads = torch.get_num_threads()
        places = np.zeros(self._padded_outputs, dtype=np.int64)
        place = 0
        for weight in weights:
            stride = weight.stride(0) * weight.element_size()
            places[place : place + len(weight)] = weight.data_ptr() + stride * np.arange(
                len(weight)
            )
            place += len(weight)
        scratch = torch.empty(threads * (self._padded_inputs + INPUTS))
        claimed = np.zeros(threads, dtype=np.int64)
        self._omp.run(
            arrange.address,
            [
                form, panel, self.shape[1], self._padded_inputs, self._padded_outputs,
                places.ctypes.data, int(weights[0].dtype == torch.bfloat16), self.packed.data_ptr(),
                address(self.scale), self._sums.data_ptr() if form == p.DOT_INT8 else 0,
                address(scratch), claimed.ctypes.data,
            ],
            threads=threads,
        )  # fmt: skip
        if form in (p.DOT_INT8, p.WIDENED_INT8):
            self.scale /= _LARGEST  # the scale of a row of x is its absmax then


# Whether the panels have the order of oneDNN's packed float32 weights.
READS_ONEDNN_ORDER = FLOAT32_PANEL == WIDTH

K_BLOCKS = (4096, 3072, 2048, 1536, 1024, 768, 512, 384, 256, 128, 64)


def k_block_of(weights: Sequence[Tensor], x: Tensor, expected: Tensor) -> int | None:
    """Return the `k_block` with which a float32 layer gives exactly `expected`; None for none.

    x: (rows, in); `expected`: (rows, out).
    """
    inputs = x.shape[1]
    layer = PanelLinear(p.FLOAT32, weights, None)
    for k_block in (inputs, *(k_block for k_block in K_BLOCKS if k_block < inputs)):
        layer.words[p.K_BLOCK] = k_block
        if torch.equal(layer(x), expected):
            return k_block
    return None


def float32_linear(weights: Sequence[Tensor], bias: Tensor | None, *, k_block: int) -> PanelLinear:
    """Return a layer in float32; `k_block`: see layout.K_BLOCK."""
    return PanelLinear(p.FLOAT32, weights, bias, k_block=k_block)


def bfloat16_linear(
    weights: Sequence[Tensor], bias: Tensor | None, *, k_block: int | None = None
) -> PanelLinear:
    """Return a layer whose weights are bfloat16 and whose arithmetic is float32.

    With the same `k_block` it has the bits of `float32_linear` on the same weights.
    """
    return PanelLinear(p.WIDENED_BFLOAT16, weights, bias, k_block=k_block)


def tiled_words(weight: int, outputs: int, inputs: int, bias: int) -> list[int]:
    """Return the words of a layer whose bfloat16 weights oneDNN has packed for AMX.

    `weight`, `bias`: addresses; of the bias in float32, or 0. Sizes are multiples of WIDTH.
    """
    return [p.TILED_BFLOAT16, weight, outputs, inputs, bias, inputs, 0, 0, TILED_BFLOAT16_PANEL]


def tiled_linear(weight: int, shape: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    """Return such a layer without bias; the caller keeps the packed weights alive."""
    omp = openmp()
    assert omp is not None
    words = np.array(tiled_words(weight, *shape, 0), dtype=np.int64)
    return lambda x: multiply(words, x, omp)


def int8_linear(weights: Sequence[Tensor], bias: Tensor | None) -> PanelLinear:
    """Return a layer in int8 (W8A8 dynamic), bit-identical to quantized.Int8Linear."""
    return PanelLinear(_INT8, weights, bias)


def grouped_int8_linear(weights: Sequence[Tensor], bias: Tensor | None) -> PanelLinear:
    """Return a layer in int8 with a scale for each group of inputs: see `grouped`."""
    return PanelLinear(p.GROUPED_INT8, weights, bias)


def grouped_int4_linear(weights: Sequence[Tensor], bias: Tensor | None) -> PanelLinear:
    """Return a layer in int4 with a scale for each group of inputs, by inputs in int8."""
    return PanelLinear(p.GROUPED_INT4, weights, bias)


def reads_amx_order() -> bool:
    """Whether there is a kernel for weights that oneDNN packs for AMX."""
    return HAS_AMX


def reads_onednn_bfloat16() -> bool:
    """Whether there is a kernel for bfloat16 weights that oneDNN packs, for AMX or without it."""
    return HAS_BFLOAT16


def reads_onednn_int8() -> bool:
    """Whether there is a kernel for int8 weights that oneDNN packs."""
    return HAS_VNNI


def has_int8() -> bool:
    """Whether this processor has the instructions for layers in int8 and int4."""
    return HAS_AVX2


def multiply(words: np.ndarray, x: Tensor, omp: OpenMP, *, threads: int | None = None) -> Tensor:
    """Return layer(x) (rows, outputs) for x (rows, inputs); `words`: the layer, as in `layout`."""
    rows, inputs = x.shape
    threads = threads or torch.get_num_threads()
    y = x.new_empty(rows, int(words[p.OUTPUTS]))
    prepared, private = whole_lines(rows * (WIDTH + 2 * inputs)), whole_lines(rows * WIDTH * FLOAT)
    scratch = torch.empty(prepared + threads * private, dtype=torch.uint8)
    claimed = np.zeros(threads, dtype=np.int64)
    omp.run(
        linear_entry.address,
        [
            omp.barrier, words.ctypes.data, address(x), rows, address(y),
            scratch.data_ptr(), scratch.data_ptr() + prepared, private, claimed.ctypes.data,
        ],
        threads=threads,
    )  # fmt: skip
    return y


def whole_lines(*num_bytes: int) -> int:
    """Return the bytes for all of these, each rounded up to whole cache lines."""
    return sum(-(-count // LINE) * LINE for count in num_bytes)


def _whole(size: int) -> int:
    return -(-size // WIDTH) * WIDTH


def _readable(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the weights in one dtype, float32 or bfloat16, with contiguous rows."""
    detached = [weight.detach() for weight in weights]
    if {weight.dtype for weight in detached} not in ({torch.float32}, {torch.bfloat16}):
        detached = [weight.float() for weight in detached]
    return [weight if weight.stride(1) == 1 else weight.contiguous() for weight in detached]
