"""Batch-invariant linear layers: a row gets the same bits whatever else is in the batch.

Libraries choose kernels by the number of rows. So the number of rows is padded to a multiple, and
many rows are computed in parts, as a probe has found to make no difference to the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from .linear_forms import Linear
from .quantized import Bfloat16Linear

_ROW_MULTIPLES = (1, 2, 4, 8, 16, 32)
_PROBED_ROWS = 64
# With AMX, oneDNN sums the inputs in other blocks from 33 rows on. Parts of 32 rows take 1.4 to 2.4
# times as long as all rows at once (tests/benchmarks/README.md).
_MOST_ROWS = (None, 32)
_CANCELED_OUTPUTS = 32  # outputs whose sums cancel to nearly zero in the probe
_TRIED_ROWS = 4  # probed rows in smaller batches, where results are not rounded


@dataclass(frozen=True)
class Rows:
    """Numbers of rows for which a form of a layer is batch-invariant."""

    multiple: int
    most: int | None  # a larger number of rows is computed in parts

    def compute(self, form: Linear, x: torch.Tensor, step: Callable[[int], int]) -> torch.Tensor:
        """Apply the form to parts of x, padded to multiples of `step` of their rows, too."""
        if self.most is None or len(x) <= self.most:
            return self._padded(form, x, step)
        return torch.cat([self._padded(form, part, step) for part in torch.split(x, self.most)])

    def _padded(self, form: Linear, x: torch.Tensor, step: Callable[[int], int]) -> torch.Tensor:
        missing = -len(x) % max(self.multiple, step(len(x)))
        if not missing:
            return form(x)
        return form(functional.pad(x, (0, 0, 0, missing)))[: len(x)]


class BatchInvariantLinear:
    """Computes only numbers of rows for which the form is batch-invariant."""

    def __init__(self, form: Linear, rows: Rows) -> None:
        self.form = form
        self._rows = rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._rows.compute(self.form, x, _row_step)


def _row_step(rows: int) -> int:
    """Return the multiple to which a number of rows is padded: an eighth of its power of two.

    oneDNN compiles and caches kernels for each number of rows: 2.4 MB in a model of few layers. So
    it gets few different ones: 1, 2, 4, … 32, 36, … 64, 72, … 128.
    """
    return 1 if rows == 1 else max(2, 1 << (rows - 1).bit_length() >> 4)


def probe_rows(forms: Sequence[Linear], *, like: torch.Tensor) -> list[Rows] | None:
    """Return, for each form of a layer, the numbers of rows for which it is batch-invariant.

    With them, all forms give the same bits; None if there are no such numbers. Probed with inputs
    made for `like`, (out, in), with this thread's number of threads.
    """
    x = _probe(like)
    for most in _MOST_ROWS:
        whole = torch.cat([forms[0](part) for part in torch.split(x, most or len(x))])
        multiples = [_row_multiple(form, x, whole, most or len(x)) for form in forms]
        if None not in multiples:
            return [Rows(multiple, most) for multiple in multiples if multiple is not None]
    return None


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


def _row_multiple(form: Linear, x: torch.Tensor, whole: torch.Tensor, most: int) -> int | None:
    # Rounded to bfloat16, most sums are equal by chance: differences show only in many rows.
    is_rounded = x.dtype != torch.float32 or isinstance(form, Bfloat16Linear)
    tried = _PROBED_ROWS if is_rounded else _TRIED_ROWS
    for row_multiple in _ROW_MULTIPLES:
        counts = range(row_multiple, min(8 * row_multiple, most), row_multiple)
        if all(
            torch.equal(
                torch.cat([form(rows) for rows in torch.split(x[:end], count)]), whole[:end]
            )
            for count in (*counts, most // 2, most)
            if (end := max(tried, row_multiple) // count * count or count)
        ):
            return row_multiple
    return None
