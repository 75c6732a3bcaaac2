"""Log-probabilities of completions, computed on packs.

TRL has padded tensors, (B, P) prompts and (B, C) completions, and its loss takes (B, C)
log-probabilities. This module converts between them and packs. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from .packing import Sample


def samples_of(batch: Mapping[str, Tensor]) -> list[Sample]:
    """Read the rows of a padded batch: prompt_ids, prompt_mask, completion_ids, completion_mask."""

    def unpadded(name: str) -> Iterator[tuple[int, ...]]:
        ids, mask = batch[f"{name}_ids"].tolist(), batch[f"{name}_mask"].tolist()
        for row, kept in zip(ids, mask, strict=True):
            yield tuple(token for token, is_kept in zip(row, kept, strict=True) if is_kept)

    pairs = zip(unpadded("prompt"), unpadded("completion"), strict=True)
    return [Sample(row, prompt, completion) for row, (prompt, completion) in enumerate(pairs)]


def split(rows: Sequence[Sample], most_tokens: int) -> list[list[Sample]]:
    """Divide samples into packs of at most `most_tokens`, or of one sample.

    The packs do not depend on the order of the samples, so that equal policy and reference weights
    give a KL of exactly 0.
    """
    packs: list[list[Sample]] = []
    tokens = 0  # of the last pack
    last: tuple[int, ...] | None = None
    for row in sorted(rows, key=lambda row: (row.prompt, row.completion)):
        added = row.num_inputs + (len(row.prompt) if row.prompt != last else 0)
        if not packs or tokens + added > most_tokens:
            packs.append([])
            tokens, added = 0, len(row.prompt) + row.num_inputs
        packs[-1].append(row)
        tokens, last = tokens + added, row.prompt
    return packs
