"""Batch-invariant linear layers: a row gets the same bits whatever else is in the batch.

Libraries choose kernels by the number of rows. So the number of rows is padded to a multiple that a
probe has found to make no difference to the bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from .linear_forms import Linear
from .quantized import Bfloat16Linear

_ROW_MULTIPLES = (1, 2, 4, 8, 16, 32)
_PROBED_ROWS = 64
_CANCELED_OUTPUTS = 32  # outputs whose sums cancel to nearly zero in the probe
_TRIED_ROWS = 4  # probed rows in smaller batches, where results are not rounded


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


def _row_step(rows: int) -> int:
    """Return the multiple to which a number of rows is padded: an eighth of its power of two.

    oneDNN compiles and caches kernels for each number of rows: 2.4 MB in a model of few layers. So
    it gets few different ones: 1, 2, 4, … 32, 36, … 64, 72, … 128.
    """
    return 1 if rows == 1 else max(2, 1 << (rows - 1).bit_length() >> 4)


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
