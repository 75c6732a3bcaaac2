"""Encodes the images of a prompt, block by block, so that scheduler steps can run in between.

For models of the Qwen-VL family (`vision_encoder.py`). The features of recent images are cached:
the next request of a GUI agent's episode shows the same screenshots again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ..compute.aten_overrides import fast_kernels
from ..compute.levels import NATIVE, levels
from ..compute.linear_forms import bfloat16_linear
from ..compute.quantized import SwappedLinears
from .images import MODEL_TYPES
from .request import Image, Request
from .vision_encoder import ENCODERS


class VisionEncoder:
    """The vision encoder of a model, with an LRU cache of image features."""

    def __init__(self, model: Any, budget_bytes: int, *, precision: str = NATIVE) -> None:
        """`precision`: the decoder's. If it is not native, the encoder computes in bf16 where the
        processor has bf16 units. `budget_bytes`: of the feature cache.
        """
        self._visual = _visual_of(model)
        self._encode = ENCODERS[model.config.model_type]
        is_half = precision != NATIVE and (
            self._visual.device.type != "cpu" or levels().bfloat16 == "units"
        )
        self._swapped = SwappedLinears(self._visual, bfloat16_linear) if is_half else None
        self._budget_bytes = budget_bytes
        self._cached: OrderedDict[int, torch.Tensor] = OrderedDict()

    @staticmethod
    def is_in(model: Any) -> bool:
        """Whether a model accepts images."""
        return model.config.model_type in MODEL_TYPES and _visual_of(model) is not None

    @property
    def merge(self) -> int:
        """Patches per token, along each side."""
        return int(self._visual.spatial_merge_size)

    @contextmanager
    def fast(self) -> Iterator[None]:
        """Use the fastest GEMM in this context; bf16 layers only in this thread."""
        with fast_kernels(), self._swapped.in_place() if self._swapped else nullcontext():
            yield

    def features(self, image: Image) -> Iterator[torch.Tensor | None]:
        """Yield None after each block, then the features (1 + deep, tokens, hidden)."""
        found = self._cached.get(image.digest)
        if found is None:
            for found in self._encode_image(image):  # noqa: B007  the last value is used
                yield None
            assert found is not None
            self._cached[image.digest] = found
            self._evict()
        self._cached.move_to_end(image.digest)
        yield found

    def _encode_image(self, image: Image) -> Iterator[torch.Tensor]:
        """Yield the output of each block, and last the features."""
        visual = self._visual
        patches = image.patches().to(visual.device, visual.dtype)
        yield from self._encode(visual, patches, torch.tensor([image.grid]))

    @property
    def cached_bytes(self) -> int:
        """Size of the feature cache."""
        return sum(features.nbytes for features in list(self._cached.values()))

    def _evict(self) -> None:
        held = self.cached_bytes
        while len(self._cached) > 1 and held > self._budget_bytes:
            held -= self._cached.popitem(last=False)[1].nbytes


def _visual_of(model: Any) -> Any:
    return getattr(getattr(model, "model", None), "visual", None)


class PromptImages:
    """The images of one prompt: RoPE positions (3, T) of its tokens, and image features."""

    def __init__(self, encoder: VisionEncoder, request: Request, computed: int) -> None:
        """Images within the first `computed` positions (a cached prefix) are not encoded."""
        self.positions = rope_positions_of(len(request.ids), request.images, encoder.merge)
        self.offset = int(self.positions.max()) + 1 - len(request.ids)
        self.is_complete = False
        self._encoder = encoder
        self._encoded: list[tuple[int, torch.Tensor]] = []
        images = [p for p in request.images if p.start + p.num_tokens > computed]
        self._work = _encode_images(encoder, images, self._encoded)

    def encode(self, *, until: float) -> None:
        """Encode until a time of `perf_counter`; sets `is_complete` when all images are encoded."""
        with self._encoder.fast():
            self.is_complete = not any(time.perf_counter() >= until for _ in self._work)

    def features(self, begin: int, end: int) -> list[tuple[int, torch.Tensor]]:
        """Return image features at positions `begin` to `end`, each with its offset from `begin`.

        The features of each are (1 + deep, tokens, hidden).
        """
        found = []
        for start, features in self._encoded:
            first, last = max(start, begin), min(start + features.shape[1], end)
            if first < last:
                found.append((first - begin, features[:, first - start : last - start]))
        return found


def _encode_images(
    encoder: VisionEncoder, images: Sequence[Image], found: list[tuple[int, torch.Tensor]]
) -> Iterator[None]:
    """Yield after each block; appends the features and first position of each image to `found`."""
    for image in images:
        for features in encoder.features(image):
            if features is not None:
                found.append((image.start, features))
            yield


def rope_positions_of(length: int, images: Sequence[Image], merge: int) -> torch.Tensor:
    """M-RoPE positions (time, row, column): (3, length) int64 (Qwen2-VL, arXiv:2409.12191, 2.1).

    Text tokens have the same position on all three axes. Image tokens spread over rows and columns,
    and the text after an image continues behind its longer side.
    """
    parts, position, place = [], 0, 0
    for image in images:
        text = image.start - position
        parts.append(torch.arange(place, place + text).expand(3, -1))
        place += text
        times, height, width = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
        axes = torch.meshgrid(
            torch.arange(times), torch.arange(height), torch.arange(width), indexing="ij"
        )
        parts.append(torch.stack(axes).reshape(3, -1) + place)
        place += max(height, width)
        position = image.start + image.num_tokens
    parts.append(torch.arange(place, place + length - position).expand(3, -1))
    return torch.cat(parts, dim=1)
