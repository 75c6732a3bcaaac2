"""Batch-invariant linear layers in the form that this machine computes fastest.

The same row must give the same bits whatever other rows are computed with it: then a request gets
the tokens that it would get alone. Libraries choose other kernels for few rows, so it is measured,
not assumed, what number of rows each form has to be given multiples of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from ...configs.memory import available_bytes
from ...configs.precision import NATIVE
from . import onednn
from .device import has_bfloat16
from .levels import MANY_ROWS, levels, why_not
from .quantized import Bfloat16Linear, CastLinear, Int8Linear, LinearFactory, LinearFn

log = logging.getLogger(__name__)

_QUANTA = (1, 2, 4, 8, 16, 32)
_PROBED_ROWS = 64
_CANCELED_OUTPUTS = 32  # whose sums are nearly zero
_TRIED_ROWS = 4  # of them, in the smaller batches
_TRIED_OUTPUTS = 1024
_SPARE_BYTES = 2**30  # of memory that packing leaves free
_PROBED_OUTPUTS = 16_384  # of a vocabulary: all of it would take a second


Linear = LinearFn  # x: (rows, in); y: (rows, out)


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


class UnpackedLinear(InPlaceLinear):
    """float32 on a CPU by oneDNN, on the weights where they are."""

    _multiply = staticmethod(onednn.linear)


class PackedLinear:
    """float32 on a CPU by oneDNN, on a copy of the weights in the order that it reads fastest."""

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self.packed = onednn.pack(weight)
        self.bias = bias
        self.shape: tuple[int, int] = (len(weight), weight.shape[1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return onednn.linear(x, self.packed, self.bias)


class NativeFloat32Linear:
    """float32 on a CPU by warmd's kernels, up to so many rows as they are faster; the same bits."""

    def __init__(
        self,
        panels: Any,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        most_rows: int,
    ) -> None:
        """`panels`: a native.panels.PanelLinear of these weights."""
        self.panels = panels
        self.shape: tuple[int, int] = panels.shape
        self._most_rows = most_rows
        self._unpacked = UnpackedLinear(weights, bias) if most_rows < MANY_ROWS else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._unpacked is not None and len(x) > self._most_rows:
            return self._unpacked(x)
        y: torch.Tensor = self.panels(x)
        return y


def packed_float32(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> LinearFn:
    """Return a float32 layer on packed weights, by the kernel that `levels` names."""
    if levels().float32 == "warmd":
        from .native import panels

        # Where oneDNN packs in the order that warmd's kernels read, one copy serves both
        # (native.fused).
        if not panels.READS_ONEDNN_ORDER:
            run = _run_of(weights, bias)
            if run is not None:
                packed = panels.float32_linear(weights, bias, run=run)
                return NativeFloat32Linear(packed, weights, bias, levels().most_rows)
    return PackedLinear(weights, bias)


_runs: dict[tuple[Any, ...], int | None] = {}  # by the shape of a layer


def _run_of(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> int | None:
    """How many inputs oneDNN sums up before it adds that to the sum of those before.

    Tried on the first outputs, for layers of one shape once; None where its sums are none of these.
    """
    from .native import panels

    kind = (tuple(weight.shape for weight in weights), bias is None)
    if kind not in _runs:
        some, first = [], _TRIED_OUTPUTS
        for weight in weights:
            some.append(weight[:first])
            first -= len(some[-1])
        x = torch.randn(
            _TRIED_ROWS, weights[0].shape[1], generator=torch.Generator().manual_seed(0)
        )
        whole = [
            onednn.linear(x, weight, None)[:, : len(part)]
            for weight, part in zip(weights, some, strict=True)
        ]
        found = panels.run_of(some, x, torch.cat(whole, dim=1))
        if not any(bool(weight.any()) for weight in some):
            return found  # of zeros: that says nothing of other layers
        _runs[kind] = found
    return _runs[kind]


def int8_linear(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> LinearFn:
    """Return a layer in dynamic int8 by the kernel that `levels` names (a LinearFactory)."""
    if levels().int8 == "warmd":
        from .native import panels

        return panels.int8_linear(weights, bias)
    return Int8Linear(weights, bias)


def bfloat16_linear(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> LinearFn:
    """Return a layer in bfloat16 in the form that its device takes (a LinearFactory)."""
    if weights[0].device.type != "cpu":
        return CastLinear(weights, bias)
    if levels().bfloat16 == "storage":
        from .native import panels

        return panels.bfloat16_linear(weights, bias)
    return Bfloat16Linear(weights, bias)


class LazilyPackedLinear:
    """float32 on a CPU: unpacked at first, packed later on; the bits are the same.

    To pack a 0.5B model takes up to seconds, which a first token should not wait for: so each layer
    is packed after some calls of its own, one after the other. Without memory for that it stays as
    it is.
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


_told: set[str] = set()  # precisions that are not served here, once logged


def served_precision(asked: str, weight: torch.Tensor) -> str:
    """Return the precision that is served for `asked`: "int8", "bf16" or "native".

    On a CPU `levels` says what is served. A GPU that has bf16 gives it for int8, too: torch's
    product of 8-bit integers there takes more than 16 rows, and a single sequence has one.
    """
    if asked not in ("int8", "bf16"):
        return NATIVE
    if has_bfloat16(weight.device):
        return "bf16"
    if weight.device.type != "cpu":
        return NATIVE
    served = levels().served(asked)
    if served != asked and asked not in _told:
        _told.add(asked)
        log.warning("%s", why_not(asked))
    return served


def has_onednn(weight: torch.Tensor) -> bool:
    """Whether oneDNN's products are there for a layer of these weights."""
    return weight.device.type == "cpu" and onednn.is_available()


class Linears:
    """LinearFactorys the layers of one model."""

    def __init__(self, precision: str, *, spare_bytes: int | None = None) -> None:
        """`precision`: what `served_precision` returned. `spare_bytes`: see `_pack`."""
        self._spare_bytes = _SPARE_BYTES if spare_bytes is None else spare_bytes
        self.is_exact = True  # whether no row depends on the others, for layers that were made
        self._precision = precision
        self._lacks_memory = False  # to pack more layers
        self._quanta: dict[tuple[Any, ...], list[int]] = {}  # by forms and shape

    def fused(
        self, layers: Sequence[torch.nn.Linear | torch.nn.Embedding], *, patience: int
    ) -> Linear:
        """Return layers of one input as one layer, their outputs side by side.

        `patience`: see LazilyPackedLinear.
        """
        weights = [layer.weight.detach() for layer in layers]
        makes = _forms(self._precision, weights[0])
        bias = _bias(layers, weights)
        quanta = self._quanta_of(makes, weights)
        first = ExactLinear(makes[0](weights, bias), quanta[0])
        if len(makes) == 1:
            return first
        pack = partial(self._pack, makes[1], quanta[1], weights, bias)
        return LazilyPackedLinear(first, pack, patience=patience)

    def _pack(
        self,
        make: LinearFactory,
        quantum: int,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
    ) -> Linear | None:
        """Return a layer packed; None from the first one on that leaves too little memory."""
        if self._lacks_memory:
            return None
        needed = sum(weight.numel() for weight in weights) * weights[0].element_size()
        reason = ""
        if available_bytes() < needed + self._spare_bytes:  # Linux would kill the process instead
            reason = f"{available_bytes() / 2**30:.1f} GiB are free"
        else:
            try:
                return ExactLinear(make(weights, bias), quantum)
            except (MemoryError, RuntimeError) as error:  # torch and oneDNN raise the second
                reason = str(error).partition("\n")[0]
        self._lacks_memory = True
        log.warning("layers stay unpacked, which is slower, but needs less memory: %s", reason)
        return None

    def _quanta_of(
        self, makes: Sequence[LinearFactory], weights: Sequence[torch.Tensor]
    ) -> list[int]:
        """Return the quantum of each form, measured once for layers of one shape."""
        if weights[0].device.type != "cpu":
            # A GPU's libraries choose among kernels by the number of rows. Steps of fixed shapes
            # (engine/cuda_steps.py) give them more rows than there are, and sum over more than there is.
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
                log.warning(
                    "not batch-invariant on this machine: results may differ in the last bits with "
                    "the batch size"
                )
            quanta = quanta or [1] * len(makes)
            if not any(weight.any() for weight in probed):
                return quanta  # of zeros: that says nothing of other layers
            self._quanta[kind] = quanta
        return self._quanta[kind]


class Uniform:
    """LinearFactorys all layers of a model in one form, whatever that means for batches."""

    is_exact = False

    def __init__(self, make: LinearFactory) -> None:
        self._make = make

    def fused(
        self, layers: Sequence[torch.nn.Linear | torch.nn.Embedding], *, patience: int
    ) -> Linear:
        """Return layers of one input as one layer; see `Linears.fused`."""
        weights = [layer.weight.detach() for layer in layers]
        return self._make(weights, _bias(layers, weights))


def _forms(precision: str, weight: torch.Tensor) -> tuple[LinearFactory, ...]:
    """The form of a layer, or two: the one that it begins in and the one that it gets later."""
    if precision == "int8":
        return (int8_linear,)
    if precision == "bf16":
        return (bfloat16_linear,)
    if has_onednn(weight) and weight.dtype == torch.float32:
        return (UnpackedLinear, packed_float32)
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
    while isinstance(linear, LazilyPackedLinear | ExactLinear):
        linear = linear.form
    return linear


OnednnPacked = PackedLinear | Bfloat16Linear | Int8Linear


def panels_of(form: Linear) -> Any:
    """The native.panels.PanelLinear that computes a form, or None."""
    return getattr(form, "panels", None)


def packed_areas(linears: Iterable[Linear]) -> Iterator[tuple[int, int]]:
    """Where the weights of layers that are packed lie: address and bytes of each."""
    for linear in linears:
        form = innermost(linear)
        if isinstance(form, OnednnPacked):
            yield onednn.address_of(form.packed), onednn.bytes_of(form.packed)
        elif (panels := panels_of(form)) is not None:
            yield panels.packed.data_ptr(), panels.num_bytes


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
    x = _probe(like)
    whole = forms[0](x)
    quanta = [_quantum(form, x, whole) for form in forms]
    return None if None in quanta else [quantum for quantum in quanta if quantum is not None]


def _probe(like: torch.Tensor) -> torch.Tensor:
    """Random rows whose products with the first rows of `like` are nearly zero.

    There the order of a sum shows in the leading digits. It is behind those that bfloat16 keeps
    where sums are as large as usual: 9 of 48,000 differed in a layer of 1,216 inputs (AVX-512).
    """
    generator = torch.Generator(like.device).manual_seed(0)
    x = torch.randn(_PROBED_ROWS, like.shape[1], generator=generator, device=like.device)
    known = like[: min(_CANCELED_OUTPUTS, like.shape[1] // 2)].float()
    if len(known):
        x -= (x @ known.T) @ torch.linalg.pinv(known @ known.T, hermitian=True) @ known
    return x.to(like.dtype)


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
