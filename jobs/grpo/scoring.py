"""The log-probabilities of completions, as GRPO asks for them, by way of packs.

TRL keeps a batch as padded tensors, (B, P) prompts on the left and (B, C) completions on the right;
its loss wants (B, C) log-probabilities. Between the two stand packs of rows. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from .packing import Row


def rows_of(batch: Mapping[str, Tensor]) -> list[Row]:
    """Read the rows of a padded batch: prompt_ids, prompt_mask, completion_ids, completion_mask."""

    def unpadded(name: str) -> Iterator[tuple[int, ...]]:
        ids, mask = batch[f"{name}_ids"].tolist(), batch[f"{name}_mask"].tolist()
        for row, kept in zip(ids, mask, strict=True):
            yield tuple(token for token, is_kept in zip(row, kept, strict=True) if is_kept)

    pairs = zip(unpadded("prompt"), unpadded("completion"), strict=True)
    return [Row(row, prompt, completion) for row, (prompt, completion) in enumerate(pairs)]


def split(rows: Sequence[Row], most_tokens: int) -> list[list[Row]]:
    """Divide rows into packs of at most `most_tokens`, or of one row.

    The same rows give the same packs in whatever order they come: where policy and reference are
    still one model, their difference is to be 0, and not how one sum was rounded in two places.
    """
    packs: list[list[Row]] = []
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
