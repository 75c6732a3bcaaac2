"""Batch-invariant linear layers, in the form that is fastest on this machine.

A row must get the same bits whatever else is in the batch, so that a request gets the same tokens
alone and batched. Libraries choose kernels by the number of rows, so each form is probed for the
multiple to which the number of rows must be padded.
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

_ROW_MULTIPLES = (1, 2, 4, 8, 16, 32)
_PROBED_ROWS = 64
_CANCELED_OUTPUTS = 32  # outputs whose sums cancel to nearly zero in the probe
_TRIED_ROWS = 4  # probed rows in smaller batches, where results are not rounded
_TRIED_OUTPUTS = 1024
_SPARE_BYTES = 2**30  # memory that packing leaves free
_PROBED_OUTPUTS = 16_384  # of a vocabulary head: all of it would take a second


Linear = LinearFn  # x: (rows, in); y: (rows, out)


class PlainLinear:
    """PyTorch's linear layer, on one fused weight."""

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        self._weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)

    def share_weight(self, layers: Sequence[torch.nn.Linear | torch.nn.Embedding]) -> None:
        """Let the layers that were fused use the fused weight: it is no second copy of theirs."""
        if len(layers) > 1:
            parts = torch.split(self._weight, [len(layer.weight) for layer in layers])
            for layer, part in zip(layers, parts, strict=True):
                layer.weight.data = part


class InPlaceLinear:
    """PyTorch's linear layer on the model's weights, one GEMM each: no fused copy."""

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
    """float32 on a CPU by oneDNN, on the model's weights."""

    _multiply = staticmethod(onednn.linear)


class PackedLinear:
    """float32 on a CPU by oneDNN, on a packed copy of the weights."""

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self.packed = onednn.pack(weight)
        self.bias = bias
        self.shape: tuple[int, int] = (len(weight), weight.shape[1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return onednn.linear(x, self.packed, self.bias)


class NativeFloat32Linear:
    """float32 on a CPU: warmd's kernels up to `max_rows` rows, oneDNN beyond; the same bits."""

    def __init__(
        self,
        panels: Any,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        max_rows: int,
    ) -> None:
        """`panels`: a native.panels.PanelLinear of these weights."""
        self.panels = panels
        self.shape: tuple[int, int] = panels.shape
        self._max_rows = max_rows
        self._unpacked = UnpackedLinear(weights, bias) if max_rows < MANY_ROWS else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._unpacked is not None and len(x) > self._max_rows:
            return self._unpacked(x)
        y: torch.Tensor = self.panels(x)
        return y


def packed_float32(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> LinearFn:
    """Return a float32 layer on packed weights, with the kernel that `levels` selects."""
    if levels().float32 == "warmd":
        from .native import panels

        # If oneDNN packs in the order of warmd's kernels, both share one copy (native.fused).
        if not panels.READS_ONEDNN_ORDER:
            k_block = _k_block_of(weights, bias)
            if k_block is not None:
                packed = panels.float32_linear(weights, bias, k_block=k_block)
                return NativeFloat32Linear(packed, weights, bias, levels().max_rows)
    return PackedLinear(weights, bias)


_k_blocks: dict[tuple[Any, ...], int | None] = {}  # by the shapes of a layer


def _k_block_of(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> int | None:
    """Return the block of inputs (K) that oneDNN sums before it adds to the accumulated sum.

    Probed on the first outputs, once per shape; None if none of the known blocks gives its bits.
    """
    from .native import panels

    kind = (tuple(weight.shape for weight in weights), bias is None)
    if kind not in _k_blocks:
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
        found = panels.k_block_of(some, x, torch.cat(whole, dim=1))
        if not any(bool(weight.any()) for weight in some):
            return found  # all zeros: no evidence for other layers
        _k_blocks[kind] = found
    return _k_blocks[kind]


def int8_linear(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> LinearFn:
    """Return a W8A8 dynamic int8 layer, with the kernel that `levels` selects (LinearFactory)."""
    if levels().int8 == "warmd":
        from .native import panels

        return panels.int8_linear(weights, bias)
    return Int8Linear(weights, bias)


def bfloat16_linear(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> LinearFn:
    """Return a bfloat16 layer in the form for its device (LinearFactory)."""
    if weights[0].device.type != "cpu":
        return CastLinear(weights, bias)
    if levels().bfloat16 == "storage":
        from .native import panels

        return panels.bfloat16_linear(weights, bias)
    return Bfloat16Linear(weights, bias)


class LazilyPackedLinear:
    """float32 on a CPU: unpacked at first, packed later; the same bits.

    Packing a 0.5B model takes seconds, which the first token should not wait for. So each layer is
    packed after some calls, one layer after another. Without memory for it a layer stays unpacked.
    """

    def __init__(
        self, unpacked: Linear, pack: Callable[[], Linear | None], *, patience: int
    ) -> None:
        """`patience`: calls before packing. `pack` returns None if there is too little memory."""
        self.form = unpacked
        self._pack: Callable[[], Linear | None] | None = pack
        self._patience = patience

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._patience == 0:
            self.pack_now()
        self._patience -= 1
        return self.form(x)

    def pack_now(self) -> bool:
        """Pack now, if not done; return whether there was something to do."""
        if self._pack is None:
            return False
        self.form = self._pack() or self.form
        self._pack = None
        return True


_warned: set[str] = set()  # precisions that are not served here and were logged


def served_precision(asked: str, weight: torch.Tensor) -> str:
    """Return the precision that is served for `asked`: "int8", "bf16" or "native".

    On a CPU `levels` decides. A GPU with bf16 serves it for int8, too: torch's int8 GEMM needs more
    than 16 rows there, and single-sequence decode has one.
    """
    if asked not in ("int8", "bf16"):
        return NATIVE
    if has_bfloat16(weight.device):
        return NATIVE if weight.dtype == torch.bfloat16 else "bf16"  # no copy of the same weights
    if weight.device.type != "cpu":
        return NATIVE
    served = levels().served(asked)
    if served != asked and asked not in _warned:
        _warned.add(asked)
        log.warning("%s", why_not(asked))
    return served


def has_onednn(weight: torch.Tensor) -> bool:
    """Whether oneDNN is available for a layer with these weights."""
    return weight.device.type == "cpu" and onednn.is_available()


class LinearBuilder:
    """Builds the linear layers of one model in its precision."""

    def __init__(self, precision: str, *, spare_bytes: int | None = None) -> None:
        """`precision`: what `served_precision` returned. `spare_bytes`: see `_pack`."""
        self._spare_bytes = _SPARE_BYTES if spare_bytes is None else spare_bytes
        self.is_batch_invariant = True  # of all layers built so far
        self._precision = precision
        self._lacks_memory = False  # to pack more layers
        self._row_multiples: dict[tuple[Any, ...], list[int]] = {}  # by forms and shape

    def fused(
        self, layers: Sequence[torch.nn.Linear | torch.nn.Embedding], *, patience: int
    ) -> Linear:
        """Fuse layers with the same input into one, their outputs concatenated.

        `patience`: see LazilyPackedLinear.
        """
        weights = [layer.weight.detach() for layer in layers]
        makes = _forms(self._precision, weights[0])
        bias = _bias(layers, weights)
        if weights[0].device.type != "cpu":
            # GPU libraries choose kernels by the number of rows, and steps of fixed shapes
            # (engine/cuda_steps.py) pad both rows and attended positions.
            self.is_batch_invariant = False
            linear = makes[0](weights, bias)
            if isinstance(linear, PlainLinear):
                linear.share_weight(layers)
            return linear
        row_multiples = self._row_multiples_of(makes, weights)
        first = BatchInvariantLinear(makes[0](weights, bias), row_multiples[0])
        if len(makes) == 1:
            return first
        pack = partial(self._pack, makes[1], row_multiples[1], weights, bias)
        return LazilyPackedLinear(first, pack, patience=patience)

    def _pack(
        self,
        make: LinearFactory,
        row_multiple: int,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
    ) -> Linear | None:
        """Return a packed layer; None from the first one on that would leave too little memory."""
        if self._lacks_memory:
            return None
        needed = sum(weight.numel() for weight in weights) * weights[0].element_size()
        reason = ""
        if available_bytes() < needed + self._spare_bytes:  # Linux would kill the process instead
            reason = f"{available_bytes() / 2**30:.1f} GiB are free"
        else:
            try:
                return BatchInvariantLinear(make(weights, bias), row_multiple)
            except (MemoryError, RuntimeError) as error:  # torch and oneDNN raise the second
                reason = str(error).partition("\n")[0]
        self._lacks_memory = True
        log.warning("layers stay unpacked, which is slower, but needs less memory: %s", reason)
        return None

    def _row_multiples_of(
        self, makes: Sequence[LinearFactory], weights: Sequence[torch.Tensor]
    ) -> list[int]:
        """Return the row multiple of each form, probed once per shape."""
        kind = (*makes, *(weight.shape for weight in weights))
        if kind not in self._row_multiples:
            probed, room = [], _PROBED_OUTPUTS
            for weight in weights:
                if room:
                    probed.append(weight[:room])
                    room -= len(probed[-1])
            row_multiples = probe_row_multiples(
                [make(probed, None) for make in makes], like=weights[0]
            )
            if row_multiples is None:
                self.is_batch_invariant = False
                log.warning(
                    "not batch-invariant on this machine: results may differ in the last bits with "
                    "the batch size"
                )
            row_multiples = row_multiples or [1] * len(makes)
            if not any(weight.any() for weight in probed):
                return row_multiples  # all zeros: no evidence for other layers
            self._row_multiples[kind] = row_multiples
        return self._row_multiples[kind]


class UniformBuilder:
    """Builds all linear layers of a model in one given form; not batch-invariant."""

    is_batch_invariant = False

    def __init__(self, make: LinearFactory) -> None:
        self._make = make

    def fused(
        self, layers: Sequence[torch.nn.Linear | torch.nn.Embedding], *, patience: int
    ) -> Linear:
        """Fuse layers with the same input into one; see `LinearBuilder.fused`."""
        weights = [layer.weight.detach() for layer in layers]
        return self._make(weights, _bias(layers, weights))


def _forms(precision: str, weight: torch.Tensor) -> tuple[LinearFactory, ...]:
    """Return the form of a layer, or two: the initial one, and the packed one."""
    if precision == "int8":
        return (int8_linear,)
    if precision == "bf16":
        return (bfloat16_linear,)
    if has_onednn(weight) and weight.dtype == torch.float32:
        return (UnpackedLinear, packed_float32)
    return (PlainLinear,)


class BatchInvariantLinear:
    """Pads the number of rows to a multiple for which the form is batch-invariant."""

    def __init__(self, form: Linear, row_multiple: int) -> None:
        self.form = form
        self._row_multiple = row_multiple

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        missing = -len(x) % max(self._row_multiple, _row_step(len(x)))
        if not missing:
            return self.form(x)
        return self.form(functional.pad(x, (0, 0, 0, missing)))[: len(x)]


def innermost(linear: Linear) -> Linear:
    """Return the form in which a layer is computed now."""
    while isinstance(linear, LazilyPackedLinear | BatchInvariantLinear):
        linear = linear.form
    return linear


OnednnPacked = PackedLinear | Bfloat16Linear | Int8Linear


def panels_of(form: Linear) -> Any:
    """Return the native.panels.PanelLinear of a form, or None."""
    return getattr(form, "panels", None)


def packed_areas(linears: Iterable[Linear]) -> Iterator[tuple[int, int]]:
    """Yield the address and bytes of each packed layer's weights."""
    for linear in linears:
        form = innermost(linear)
        if isinstance(form, OnednnPacked):
            yield onednn.address_of(form.packed), onednn.bytes_of(form.packed)
        elif (panels := panels_of(form)) is not None:
            yield panels.packed.data_ptr(), panels.num_bytes


def _row_step(rows: int) -> int:
    """Return the multiple to which a number of rows is padded: an eighth of its power of two.

    oneDNN compiles and caches kernels for each number of rows: 2.4 MB in a model of few layers. So
    it gets few different ones: 1, 2, 4, … 32, 36, … 64, 72, … 128.
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


def probe_row_multiples(forms: Sequence[Linear], *, like: torch.Tensor) -> list[int] | None:
    """Return, for each form of a layer, the multiple that makes it batch-invariant.

    With it, all forms give the same bits; None if there is no such multiple. Probed with inputs
    made for `like`, (out, in), with this thread's number of threads.
    """
    x = _probe(like)
    whole = forms[0](x)
    row_multiples = [_row_multiple(form, x, whole) for form in forms]
    return (
        None
        if None in row_multiples
        else [row_multiple for row_multiple in row_multiples if row_multiple is not None]
    )


def _probe(like: torch.Tensor) -> torch.Tensor:
    """Return random rows that are nearly orthogonal to the first rows of `like`.

    The sums cancel, so that the order of summation shows in the leading digits. For sums of normal
    size bfloat16 rounds the difference away: 9 of 48,000 differed with 1,216 inputs (AVX-512).
    """
    generator = torch.Generator(like.device).manual_seed(0)
    x = torch.randn(_PROBED_ROWS, like.shape[1], generator=generator, device=like.device)
    known = like[: min(_CANCELED_OUTPUTS, like.shape[1] // 2)].float()
    if len(known):
        x -= (x @ known.T) @ torch.linalg.pinv(known @ known.T, hermitian=True) @ known
    return x.to(like.dtype)


def _row_multiple(form: Linear, x: torch.Tensor, whole: torch.Tensor) -> int | None:
    # Rounded to bfloat16, most sums are equal by chance: differences show only in many rows.
    is_rounded = x.dtype != torch.float32 or isinstance(form, Bfloat16Linear)
    tried = _PROBED_ROWS if is_rounded else _TRIED_ROWS
    for row_multiple in _ROW_MULTIPLES:
        counts = range(row_multiple, min(8 * row_multiple, _PROBED_ROWS), row_multiple)
        if all(
            torch.equal(
                torch.cat([form(rows) for rows in torch.split(x[:end], count)]), whole[:end]
            )
            for count in (*counts, _PROBED_ROWS // 2, _PROBED_ROWS)
            if (end := max(tried, row_multiple) // count * count or count)
        ):
            return row_multiple
    return None
