"""Looking at the pictures of a prompt, block by block, so that others go on writing meanwhile.

For models of the Qwen-VL family (`vision_encoder.py`). What was seen of a picture is kept, for the next
turn of an episode that shows it again.
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
from ..compute.linears import bfloat16_linear
from ..compute.quantized import SwappedLinears
from .images import MODEL_TYPES
from .request import Generation, Picture
from .vision_encoder import ENCODERS


class Eyes:
    """The vision part of a model, and what it saw lately."""

    def __init__(self, model: Any, budget_bytes: int, *, precision: str = NATIVE) -> None:
        """`precision`: of the decoder. With int8 and bf16 the vision part computes in bf16, where
        the processor has units for it.
        """
        self._visual = _visual_of(model)
        self._encode = ENCODERS[model.config.model_type]
        is_half = precision in ("bf16", "int8") and (
            self._visual.device.type != "cpu" or levels().bfloat16 == "units"
        )
        self._swapped = SwappedLinears(self._visual, bfloat16_linear) if is_half else None
        self._budget_bytes = budget_bytes
        self._seen: OrderedDict[int, torch.Tensor] = OrderedDict()

    @staticmethod
    def are_in(model: Any) -> bool:
        """Whether a model is shown images."""
        return model.config.model_type in MODEL_TYPES and _visual_of(model) is not None

    @property
    def merge(self) -> int:
        """Rows and columns of patches that make one token."""
        return int(self._visual.spatial_merge_size)

    @contextmanager
    def fast(self) -> Iterator[None]:
        """Compute by the fastest products while this lasts: those in bfloat16 in this thread."""
        with fast_kernels(), self._swapped.in_place() if self._swapped else nullcontext():
            yield

    def features(self, picture: Picture) -> Iterator[torch.Tensor | None]:
        """Yield None after each step of the work, then the features (1 + deep, tokens, hidden)."""
        found = self._seen.get(picture.digest)
        if found is None:
            for found in self._look(picture):  # noqa: B007  the last one counts
                yield None
            assert found is not None
            self._seen[picture.digest] = found
            self._forget()
        self._seen.move_to_end(picture.digest)
        yield found

    def _look(self, picture: Picture) -> Iterator[torch.Tensor]:
        """Yield what each block makes of the patches, and last the features."""
        visual = self._visual
        patches = picture.patches.to(visual.device, visual.dtype)
        yield from self._encode(visual, patches, torch.tensor([picture.grid]))

    def _forget(self) -> None:
        held = sum(features.nbytes for features in self._seen.values())
        while len(self._seen) > 1 and held > self._budget_bytes:
            held -= self._seen.popitem(last=False)[1].nbytes


def _visual_of(model: Any) -> Any:
    return getattr(getattr(model, "model", None), "visual", None)


class Sight:
    """The pictures of one prompt: where its positions are, and what is seen there."""

    def __init__(self, eyes: Eyes, generation: Generation, computed: int) -> None:
        """Pictures that end within the first `computed` positions are not looked at."""
        self.places = places_of(len(generation.ids), generation.pictures, eyes.merge)
        self.offset = int(self.places.max()) + 1 - len(generation.ids)
        self.is_whole = False
        self._eyes = eyes
        self._features: list[tuple[int, torch.Tensor]] = []
        pictures = [p for p in generation.pictures if p.start + p.num_tokens > computed]
        self._work = _look_at(eyes, pictures, self._features)

    def look(self, *, until: float) -> None:
        """Go on for a while; sets `is_whole` once all is seen."""
        with self._eyes.fast():
            self.is_whole = not any(time.perf_counter() >= until for _ in self._work)

    def rows(self, begin: int, end: int) -> list[tuple[int, torch.Tensor]]:
        """What stands at the positions from `begin` to `end`, each with its first place there.

        The features of each are (1 + deep, rows, hidden).
        """
        found = []
        for start, features in self._features:
            first, last = max(start, begin), min(start + features.shape[1], end)
            if first < last:
                found.append((first - begin, features[:, first - start : last - start]))
        return found


def _look_at(
    eyes: Eyes, pictures: Sequence[Picture], found: list[tuple[int, torch.Tensor]]
) -> Iterator[None]:
    """Yield after each step of the work; puts features and their first place into `found`."""
    for picture in pictures:
        for features in eyes.features(picture):
            if features is not None:
                found.append((picture.start, features))
            yield


def places_of(length: int, pictures: Sequence[Picture], merge: int) -> torch.Tensor:
    """Time, row and column of every position: (3, length) int64 (Qwen2-VL, section 2.1).

    Text is at the same place on all three; a picture spreads over rows and columns, and the text
    behind it goes on after the longer side.
    """
    parts, position, place = [], 0, 0
    for picture in pictures:
        text = picture.start - position
        parts.append(torch.arange(place, place + text).expand(3, -1))
        place += text
        times, height, width = picture.grid[0], picture.grid[1] // merge, picture.grid[2] // merge
        axes = torch.meshgrid(
            torch.arange(times), torch.arange(height), torch.arange(width), indexing="ij"
        )
        parts.append(torch.stack(axes).reshape(3, -1) + place)
        place += max(height, width)
        position = picture.start + picture.num_tokens
    parts.append(torch.arange(place, place + length - position).expand(3, -1))
    return torch.cat(parts, dim=1)
