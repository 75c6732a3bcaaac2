"""Log-probabilities of completions, computed on packs.

TRL has padded tensors, (B, P) prompts and (B, C) completions, and its loss takes (B, C)
log-probabilities. This module converts between them and packs. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from ..packing.shared_prompts import Sample


def samples_of(batch: Mapping[str, Tensor]) -> list[Sample]:
    """Read the rows of a padded batch: prompt_ids, prompt_mask, completion_ids, completion_mask.

    Completions that are masked as a whole are left out.
    """

    def unpadded(name: str) -> Iterator[tuple[int, ...]]:
        ids, mask = batch[f"{name}_ids"].tolist(), batch[f"{name}_mask"].tolist()
        for row, kept in zip(ids, mask, strict=True):
            yield tuple(token for token, is_kept in zip(row, kept, strict=True) if is_kept)

    pairs = zip(unpadded("prompt"), unpadded("completion"), strict=True)
    samples = [Sample(row, prompt, completion) for row, (prompt, completion) in enumerate(pairs)]
    return [sample for sample in samples if sample.completion]
