"""Linear layers in the form that this machine computes fastest, and alike for any batch.

The same row must give the same bits whatever other rows are computed beside it: then a request
gets the tokens that it would get alone. Libraries choose other kernels for few rows, so it is
measured, not assumed, what number of rows each form has to be given multiples of (its quantum).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from ..accelerators import has_bfloat16
from ..products import (
    Bfloat16Linear,
    Int8Linear,
    Make,
    Product,
    bfloat16_linear,
    is_bfloat16_faster,
)

log = logging.getLogger(__name__)

_QUANTA = (1, 2, 4, 8, 16, 32)
_PROBED_ROWS = 64
_TRIED_ROWS = 4  # of them, in the smaller batches
_PROBED_OUTPUTS = 16_384  # of a vocabulary: all of it would take a second


Linear = Product  # x: (rows, in); y: (rows, out)


class PlainLinear:
    """PyTorch's own."""

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        self._weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


class InPlaceLinear:
    """PyTorch's own, on the weights where they are: no copy is made to fuse them."""

    _multiply: Callable[..., torch.Tensor] = staticmethod(functional.linear)

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        self._weights = list(weights)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(self._weights) == 1:
            return self._multiply(x, self._weights[0], self._bias)
        y = torch.cat([self._multiply(x, weight, None) for weight in self._weights], dim=1)
        return y if self._bias is None else y.add_(self._bias)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return y


class UnpackedLinear(InPlaceLinear):
    """float32 on a CPU by oneDNN, on the weights where they are."""

    _multiply = staticmethod(_product)


class PackedLinear:
    """float32 on a CPU by oneDNN, on a copy of the weights in the order that it reads fastest."""

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = bias
        self.shape: tuple[int, int] = (len(weight), weight.shape[1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _product(x, self.packed, self.bias)


Packed = PackedLinear | Bfloat16Linear | Int8Linear  # in oneDNN's order, on a CPU


class PatientLinear:
    """float32 on a CPU: unpacked at first, packed later on; the bits are the same.

    To pack a 0.5B model takes seconds, which a first token should not wait for: so each layer is
    packed after some calls of its own, one after the other. Without memory for that it stays as it
    is. Per CPU second on an AMD EPYC with AVX-512, against PyTorch's own (MKL): 1.2 times as fast
    for one row, 1.8 for 16 and 2.1 for 64; packed 1.5, 2.3 and 2.3.
    """

    def __init__(
        self, unpacked: Linear, pack: Callable[[], Linear | None], *, patience: int
    ) -> None:
        """`patience`: calls before it is packed. `pack` returns None where memory lacks for it."""
        self.form = unpacked
        self._pack: Callable[[], Linear | None] | None = pack
        self._patience = patience

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._patience == 0:
            self.settle()
        self._patience -= 1
        return self.form(x)

    def settle(self) -> bool:
        """Pack it now; return whether there was something to do."""
        if self._pack is None:
            return False
        self.form = self._pack() or self.form
        self._pack = None
        return True


def served_precision(asked: str, weight: torch.Tensor) -> str:
    """Return "int8", "bf16" or "own", the dtype that the weights have: what is served as `asked`.

    int8 is for a CPU, and bf16 for one that is measured to be faster with it. A GPU that has bf16
    gives it for int8, too: torch's product of 8-bit integers there takes more than 16 rows, and who
    writes alone has one.
    """
    if asked in ("int8", "bf16") and has_bfloat16(weight.device):
        return "bf16"
    if asked == "int8" and has_onednn(weight):
        return "int8"
    if asked == "bf16" and has_onednn(weight) and is_bfloat16_faster():
        return "bf16"
    return "own"


def has_onednn(weight: torch.Tensor) -> bool:
    """Whether oneDNN's products are there for a layer of these weights."""
    return weight.device.type == "cpu" and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class Linears:
    """Makes the layers of one model."""

    def __init__(self, precision: str) -> None:
        """`precision`: what `served_precision` returned."""
        self.is_exact = True  # whether no row depends on the others, for layers that were made
        self._precision = precision
        self._lacks_memory = False  # to pack more layers
        self._quanta: dict[tuple[Any, ...], list[int]] = {}  # by forms and shape

    def fused(
        self, layers: Sequence[torch.nn.Linear | torch.nn.Embedding], *, patience: int
    ) -> Linear:
        """Return layers of one input as one layer, their outputs side by side.

        `patience`: see PatientLinear.
        """
        weights = [layer.weight.detach() for layer in layers]
        makes = _forms(self._precision, weights[0])
        bias = _bias(layers, weights)
        quanta = self._quanta_of(makes, weights)
        first = ExactLinear(makes[0](weights, bias), quanta[0])
        if len(makes) == 1:
            return first
        pack = partial(self._pack, makes[1], quanta[1], weights, bias)
        return PatientLinear(first, pack, patience=patience)

    def _pack(
        self,
        make: Make,
        quantum: int,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
    ) -> Linear | None:
        """Return a layer packed; None from the first one on that memory lacks for."""
        if self._lacks_memory:
            return None
        try:
            return ExactLinear(make(weights, bias), quantum)
        except (MemoryError, RuntimeError) as error:  # the latter from torch and oneDNN
            self._lacks_memory = True
            reason = str(error).partition("\n")[0]
            log.warning("layers stay unpacked, which is slower, but needs less memory: %s", reason)
            return None

    def _quanta_of(self, makes: Sequence[Make], weights: Sequence[torch.Tensor]) -> list[int]:
        """Return the quantum of each form, measured once for layers of one shape."""
        if weights[0].device.type != "cpu":
            # A GPU's libraries choose among kernels by the number of rows. Steps of fixed shapes
            # (fixed.py) give them more rows than there are, and sum over more than there is.
            self.is_exact = False
            return [1] * len(makes)
        kind = (*makes, *(weight.shape for weight in weights))
        if kind not in self._quanta:
            probed, room = [], _PROBED_OUTPUTS
            for weight in weights:
                if room:
                    probed.append(weight[:room])
                    room -= len(probed[-1])
            quanta = row_quanta([make(probed, None) for make in makes], like=weights[0])
            if quanta is None:
                self.is_exact = False
                log.warning("rows depend on each other here: batches may change the last bits")
            quanta = quanta or [1] * len(makes)
            if not any(weight.any() for weight in probed):
                return quanta  # of zeros: that says nothing of other layers
            self._quanta[kind] = quanta
        return self._quanta[kind]


class Uniform:
    """Makes all layers of a model in one form, whatever that means for batches."""

    is_exact = False

    def __init__(self, make: Make) -> None:
        self._make = make

    def fused(
        self, layers: Sequence[torch.nn.Linear | torch.nn.Embedding], *, patience: int
    ) -> Linear:
        """Return layers of one input as one layer; see `Linears.fused`."""
        weights = [layer.weight.detach() for layer in layers]
        return self._make(weights, _bias(layers, weights))


def _forms(precision: str, weight: torch.Tensor) -> tuple[Make, ...]:
    """The form of a layer, or two: the one that it begins in and the one that it gets later."""
    if precision == "int8":
        return (Int8Linear,)
    if precision == "bf16":
        return (bfloat16_linear,)
    if has_onednn(weight) and weight.dtype == torch.float32:
        return (UnpackedLinear, PackedLinear)
    return (PlainLinear,)


class ExactLinear:
    """A layer that is given rows in multiples of its quantum."""

    def __init__(self, form: Linear, quantum: int) -> None:
        self.form = form
        self._quantum = quantum

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        missing = -len(x) % max(self._quantum, _step(len(x)))
        if not missing:
            return self.form(x)
        return self.form(functional.pad(x, (0, 0, 0, missing)))[: len(x)]


def innermost(linear: Linear) -> Linear:
    """The form in which a layer is computed now."""
    while isinstance(linear, PatientLinear | ExactLinear):
        linear = linear.form
    return linear


def packed_areas(linears: Iterable[Linear]) -> Iterator[tuple[int, int]]:
    """Where the weights of layers that are packed lie: address and bytes of each."""
    for linear in linears:
        form = innermost(linear)
        if isinstance(form, Packed):
            yield torch.ops.mkldnn.data_ptr(form.packed), torch.ops.mkldnn._nbytes(form.packed)


def _step(rows: int) -> int:
    """What a number of rows is rounded up to multiples of: an eighth of its power of two.

    oneDNN makes and keeps kernels for each number of rows that it sees, 2.4 MB in a model of few
    layers. So it is to see few: 2, 4, … 32, 36, … 64, 72, … 128, and one as it is.
    """
    return 1 if rows == 1 else max(2, 1 << (rows - 1).bit_length() >> 4)


def _bias(
    layers: Sequence[torch.nn.Linear | torch.nn.Embedding], weights: list[torch.Tensor]
) -> torch.Tensor | None:
    biases = [getattr(layer, "bias", None) for layer in layers]
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            weight.new_zeros(len(weight)) if bias is None else bias.detach()
            for bias, weight in zip(biases, weights, strict=True)
        ]
    )


def row_quanta(forms: Sequence[Linear], *, like: torch.Tensor) -> list[int] | None:
    """Return for each form of a layer what the number of rows must be a multiple of.

    With that, rows do not depend on each other, nor on the form; None when there is no such number.
    Tried on rows like those of `like`, (any, in), with the number of threads that this thread has.
    """
    generator = torch.Generator(like.device).manual_seed(0)
    shape = (_PROBED_ROWS, like.shape[1])
    x = torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)
    whole = forms[0](x)
    quanta = [_quantum(form, x, whole) for form in forms]
    return None if None in quanta else [quantum for quantum in quanta if quantum is not None]


def _quantum(form: Linear, x: torch.Tensor, whole: torch.Tensor) -> int | None:
    # Rounded to bfloat16, most sums are the same by chance: it takes many rows to see that some
    # are not.
    is_rounded = x.dtype != torch.float32 or isinstance(form, Bfloat16Linear)
    tried = _PROBED_ROWS if is_rounded else _TRIED_ROWS
    for quantum in _QUANTA:
        counts = range(quantum, min(8 * quantum, _PROBED_ROWS), quantum)
        if all(
            torch.equal(
                torch.cat([form(rows) for rows in torch.split(x[:end], count)]), whole[:end]
            )
            for count in (*counts, _PROBED_ROWS // 2, _PROBED_ROWS)
            if (end := max(tried, quantum) // count * count or count)
        ):
            return quantum
    return None
