"""Builds the linear layers of a model, in the forms that are fastest on this machine.

A layer starts in a form that needs no preparation and is packed later; both are batch-invariant and
give the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ...configs.memory import available_bytes
from ...configs.precision import NATIVE
from . import onednn, source_pages
from .batch_invariance import BatchInvariantLinear, Rows, probe_rows
from .device import has_bfloat16
from .levels import MANY_ROWS, levels, why_not
from .linear_forms import (
    Linear,
    NativeFloat32Linear,
    OnednnPacked,
    PlainLinear,
    forms_of,
    panels_of,
)
from .quantized import LinearFactory

log = logging.getLogger(__name__)

_SPARE_BYTES = 2**30  # memory that packing leaves free
_PROBED_OUTPUTS = 16_384  # of a vocabulary head: all of it would take a second


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


def served_precision(requested: str, weight: torch.Tensor) -> str:
    """Return the precision that is served for `requested`: "int4", "int8", "bf16" or "native".

    On a CPU `levels` decides. A GPU with bf16 also serves int8 and int4 requests in bf16: torch's
    int8 GEMM needs more than 16 rows there, and single-sequence decode has one.
    """
    if requested not in ("int4", "int8", "bf16"):
        return NATIVE
    if has_bfloat16(weight.device):
        return NATIVE if weight.dtype == torch.bfloat16 else "bf16"  # no copy of the same weights
    if weight.device.type != "cpu":
        return NATIVE
    served = levels().served(requested)
    if served != requested and requested not in _warned:
        _warned.add(requested)
        log.warning("%s", why_not(requested))
    return served


class LinearBuilder:
    """Builds the linear layers of one model in its precision."""

    def __init__(
        self, precision: str, *, spare_bytes: int | None = None, releases_sources: bool = False
    ) -> None:
        """`precision`: as returned by `served_precision`, or linear_forms.HEAD_OF_INT4.

        `spare_bytes`: see `_pack`. `releases_sources`: whether a copied weight's own pages leave
        this process (source_pages); only for weights that no thread writes to.
        """
        self._spare_bytes = _SPARE_BYTES if spare_bytes is None else spare_bytes
        self._releases_sources = releases_sources
        self.is_batch_invariant = True  # of all layers built so far
        self._precision = precision
        self._lacks_memory = False  # to pack more layers
        self._rows: dict[tuple[Any, ...], list[Rows]] = {}  # by forms and shape

    def fused(
        self, layers: Sequence[torch.nn.Linear | torch.nn.Embedding], *, patience: int
    ) -> Linear:
        """Fuse layers with the same input into one, their outputs concatenated.

        `patience`: see LazilyPackedLinear.
        """
        weights = [layer.weight.detach() for layer in layers]
        makes = forms_of(self._precision, weights[0])
        bias = _bias(layers, weights)
        if weights[0].device.type != "cpu":
            # GPU libraries choose kernels by the number of rows, and steps of fixed shapes
            # (engine/cuda_steps.py) pad both rows and attended positions.
            self.is_batch_invariant = False
            linear = makes[0](weights, bias)
            if isinstance(linear, PlainLinear):
                linear.share_weight(layers)
            return linear
        rows = self._rows_of(makes, weights)
        first = self._made(BatchInvariantLinear(makes[0](weights, bias), rows[0]), weights)
        if len(makes) == 1:
            return first
        pack = partial(self._pack, makes[1], rows[1], weights, bias)
        return LazilyPackedLinear(first, pack, patience=patience)

    def _pack(
        self,
        make: LinearFactory,
        rows: Rows,
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
                return self._made(BatchInvariantLinear(make(weights, bias), rows), weights)
            except (MemoryError, RuntimeError) as error:  # torch and oneDNN raise the second
                reason = str(error).partition("\n")[0]
        self._lacks_memory = True
        log.warning("layers stay unpacked, which is slower, but needs less memory: %s", reason)
        return None

    def _made(self, linear: Linear, weights: Sequence[torch.Tensor]) -> Linear:
        """Return a layer; release the pages of `weights` if it has a copy of them."""
        if self._releases_sources and _is_copy(innermost(linear), weights):
            source_pages.release(weights)
        return linear

    def _rows_of(
        self, makes: Sequence[LinearFactory], weights: Sequence[torch.Tensor]
    ) -> list[Rows]:
        """Return the rows of each form (batch_invariance.Rows), probed once per shape."""
        kind = (*makes, *(weight.shape for weight in weights))
        if kind not in self._rows:
            probed, room = [], _PROBED_OUTPUTS
            for weight in weights:
                if room:
                    probed.append(weight[:room])
                    room -= len(probed[-1])
            rows = probe_rows([make(probed, None) for make in makes], like=weights[0])
            if rows is None:
                self.is_batch_invariant = False
                log.warning(
                    "not batch-invariant on this machine: results may differ in the last bits with "
                    "the batch size"
                )
            rows = rows or [Rows(multiple=1, most=None)] * len(makes)
            if not any(weight.any() for weight in probed):
                return rows  # all zeros: no evidence for other layers
            self._rows[kind] = rows
        return self._rows[kind]


class UniformBuilder:
    """Builds all linear layers of a model in one given form; not batch-invariant."""

    is_batch_invariant = False

    def __init__(self, make: LinearFactory) -> None:
        self._make = make
        self._made: list[tuple[Any, Sequence[torch.nn.Linear | torch.nn.Embedding]]] = []

    def fused(
        self, layers: Sequence[torch.nn.Linear | torch.nn.Embedding], *, patience: int
    ) -> Linear:
        """Fuse layers with the same input into one; see `LinearBuilder.fused`."""
        linear = self._make(*_weights(layers))
        self._made.append((linear, layers))
        return linear

    def refresh(self) -> None:
        """Copy the current weights of their layers to the built ones, which are CastLinear."""
        for linear, layers in self._made:
            linear.copy(*_weights(layers))


def innermost(linear: Linear) -> Linear:
    """Return the form in which a layer is computed now."""
    while isinstance(linear, LazilyPackedLinear | BatchInvariantLinear):
        linear = linear.form
    return linear


def _is_copy(form: Linear, weights: Sequence[torch.Tensor]) -> bool:
    """Whether a form of a layer has copied these weights and does not read them any more."""
    if isinstance(form, PlainLinear):
        return len(weights) > 1
    if isinstance(form, NativeFloat32Linear):
        return levels().max_rows >= MANY_ROWS  # otherwise it reads them for many rows
    return isinstance(form, OnednnPacked) or panels_of(form) is not None


def packed_areas(linears: Iterable[Linear]) -> Iterator[tuple[int, int]]:
    """Yield the address and bytes of each packed layer's weights."""
    for linear in linears:
        form = innermost(linear)
        if isinstance(form, OnednnPacked):
            yield onednn.address_of(form.packed), onednn.bytes_of(form.packed)
        elif (panels := panels_of(form)) is not None:
            yield panels.packed.data_ptr(), panels.num_bytes


def _weights(
    layers: Sequence[torch.nn.Linear | torch.nn.Embedding],
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    weights = [layer.weight.detach() for layer in layers]
    return weights, _bias(layers, weights)


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
