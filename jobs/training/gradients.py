"""Data parallelism: the gradients of the processes of a job, summed before they are clipped.

DistributedDataParallel reduces gradients in hooks of the model's forward and backward passes. The
packed training paths call parts of the model and add to gradients afterwards, so the sum is an
explicit step here. A loss is divided by the counts of the whole step, so gradients are summed, not
averaged. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from ..context import Ranks

BUCKET_BYTES = 32 << 20  # of gradients that are sent together


def sum_gradients(weights: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Replace the gradients of the trained weights by their sums over all ranks.

    A weight that has a gradient on one rank has one on all ranks afterwards: AdamW treats a zero
    gradient differently from None.
    """
    trained = [weight for weight in weights if weight.requires_grad]
    has_gradient = torch.tensor([w.grad is not None for w in trained], dtype=torch.int64)
    ranks.sum(has_gradient)
    gradients = []
    for weight, count in zip(trained, has_gradient.tolist(), strict=True):
        if count:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            gradients.append(weight.grad)
    for bucket in _buckets(gradients):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            ranks.sum(bucket[0])
            continue
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        ranks.sum(flat)
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group gradients, in their order, into buckets of one dtype and about BUCKET_BYTES."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (size + gradient.nbytes > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
