"""Vision encoders of the Qwen-VL models, one image at a time, as generators over their blocks.

Each yields the output of every block, so that the caller can interleave other work, and last the
features (1 + deep, tokens, hidden): the first replace token embeddings, the others are added after
the first decoder layers (DeepStack, arXiv:2406.04334). Same order of operations as in transformers.
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

# Takes the vision tower, patches (patches, values), and the grid (1, 3) int64 (t, rows, columns).
Encode = Callable[[Any, Tensor, Tensor], Iterator[Tensor]]


def _qwen2_vl(visual: Any, patches: Tensor, grid: Tensor) -> Iterator[Tensor]:
    """Qwen2-VL (arXiv:2409.12191): attention over all patches of an image."""
    ends, longest = get_vision_attention_seqlens(grid, visual.config, kwargs={})
    x = visual.patch_embed(patches)
    rope = _rope(visual, x, grid)
    for block in visual.blocks:
        x = block(x, cu_seqlens=ends, max_seqlen=longest, position_embeddings=rope)
        yield x
    yield visual.merger(x)[None]


def _qwen2_5_vl(visual: Any, patches: Tensor, grid: Tensor) -> Iterator[Tensor]:
    """Qwen2.5-VL (arXiv:2502.13923): window attention, and full attention in a few blocks."""
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
    rope = tuple(_permuted(visual, part, order) for part in _rope(visual, x, grid))
    x = _permuted(visual, x, order)
    for number, block in enumerate(visual.blocks):
        ends = whole if number in visual.fullatt_block_indexes else windows
        x = block(x, cu_seqlens=ends, position_embeddings=rope)
        yield x
    yield visual.merger(x)[torch.argsort(order)][None]


def _qwen3_vl(visual: Any, patches: Tensor, grid: Tensor) -> Iterator[Tensor]:
    """Qwen3-VL (arXiv:2511.21631): learned position embeddings, and features of several depths."""
    ends, longest = get_vision_attention_seqlens(grid, visual.config, kwargs={})
    x = visual.patch_embed(patches)
    x = x + _learned_positions(visual, grid).to(x.dtype)
    rope = _rope(visual, x, grid)
    deep = []
    for number, block in enumerate(visual.blocks):
        x = block(x, cu_seqlens=ends, max_seqlen=longest, position_embeddings=rope)
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


def _rope(visual: Any, x: Tensor, grid: Tensor) -> Any:
    """Return 2D RoPE of the patches: cos and sin, (patches, head_dim) each."""
    places = get_vision_position_ids(grid, visual.spatial_merge_size, kwargs={})
    return visual.rotary_pos_emb(x, places.to(x.device))


def _permuted(visual: Any, x: Tensor, order: Tensor) -> Tensor:
    """Reorder patches (patches, values) in groups that are merged into one token."""
    return x.reshape(len(order), visual.spatial_merge_unit, -1)[order].reshape(len(x), -1)


def _learned_positions(visual: Any, grid: Tensor) -> Tensor:
    """Return learned position embeddings, interpolated to the image's grid: (patches, hidden)."""
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
