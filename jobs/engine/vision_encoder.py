"""The vision encoders of the Qwen-VL models, block by block, of one image at a time.

Each yields what a block makes of the patches, for its caller to do something else meanwhile, and
last the features (1 + deep, tokens, hidden): those in the place of embeddings, then those that are
added behind the first layers. The order of operations is that of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.vision_utils import (
    get_vision_attention_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

# From the vision part, patches (patches, values) and the grid (1, 3) int64 of times, rows, columns.
Encode = Callable[[Any, Tensor, Tensor], Iterator[Tensor]]


def _qwen2_vl(visual: Any, patches: Tensor, grid: Tensor) -> Iterator[Tensor]:
    """Attention over all patches of an image (arXiv:2409.12191)."""
    ends, longest = get_vision_attention_seqlens(grid, visual.config, kwargs={})
    x = visual.patch_embed(patches)
    turns = _turns(visual, x, grid)
    for block in visual.blocks:
        x = block(x, cu_seqlens=ends, max_seqlen=longest, position_embeddings=turns)
        yield x
    yield visual.merger(x)[None]


def _qwen2_5_vl(visual: Any, patches: Tensor, grid: Tensor) -> Iterator[Tensor]:
    """Attention within windows, and over all patches in a few blocks (arXiv:2502.13923)."""
    whole, _ = get_vision_attention_seqlens(grid, visual.config, kwargs={})
    order, windows = get_vision_window_index(
        grid,
        spatial_merge_size=visual.spatial_merge_size,
        window_size=visual.window_size,
        patch_size=visual.patch_size,
        kwargs={},
    )
    order = order.to(patches.device)
    x = visual.patch_embed(patches)
    turns = tuple(_permuted(visual, part, order) for part in _turns(visual, x, grid))
    x = _permuted(visual, x, order)
    for number, block in enumerate(visual.blocks):
        ends = whole if number in visual.fullatt_block_indexes else windows
        x = block(x, cu_seqlens=ends, position_embeddings=turns)
        yield x
    yield visual.merger(x)[torch.argsort(order)][None]


def _qwen3_vl(visual: Any, patches: Tensor, grid: Tensor) -> Iterator[Tensor]:
    """Learned positions in addition, and features from several depths (arXiv:2511.21631)."""
    ends, longest = get_vision_attention_seqlens(grid, visual.config, kwargs={})
    x = visual.patch_embed(patches)
    x = x + _learned_positions(visual, grid).to(x.dtype)
    turns = _turns(visual, x, grid)
    deep = []
    for number, block in enumerate(visual.blocks):
        x = block(x, cu_seqlens=ends, max_seqlen=longest, position_embeddings=turns)
        if number in visual.deepstack_visual_indexes:
            place = visual.deepstack_visual_indexes.index(number)
            deep.append(visual.deepstack_merger_list[place](x))
        yield x
    yield torch.stack([visual.merger(x), *deep])


ENCODERS: dict[str, Encode] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
}


def _turns(visual: Any, x: Tensor, grid: Tensor) -> Any:
    """The rotary positions of patches: cosines and sines, (patches, size) each."""
    places = get_vision_position_ids(grid, visual.spatial_merge_size, kwargs={})
    return visual.rotary_pos_emb(x, places.to(x.device))


def _permuted(visual: Any, x: Tensor, order: Tensor) -> Tensor:
    """Patches (patches, values) with those that make one token together in another order."""
    return x.reshape(len(order), visual.spatial_merge_unit, -1)[order].reshape(len(x), -1)


def _learned_positions(visual: Any, grid: Tensor) -> Tensor:
    """The learned grid of positions, resampled to the image's: (patches, hidden)."""
    taps, weights = get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=visual.num_grid_per_side,
        mode=visual.interpolation_mode,
        align_corners=visual.interpolation_align_corners,
        spatial_merge_size=visual.spatial_merge_size,
        kwargs={},
    )
    table: Tensor = visual.pos_embed.weight
    return (table[taps.to(table.device)] * weights.to(table.device)[:, :, None]).sum(1)
