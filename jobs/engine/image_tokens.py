"""Image inputs of the Qwen-VL family: pixel patches, and placeholder tokens in the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..context import WarmModel
from ..errors import JobFailed
from ..models.adapters import model_folder
from ..models.folder_files import naming
from .image_encoding import VisionEncoder
from .images import MODEL_TYPES, Budget, read
from .request import Image, Patches


def insert_image_tokens(
    warm: WarmModel, ids: Sequence[int], urls: Sequence[str], budget: Budget
) -> tuple[list[int], list[Image]]:
    """Expand each image token of the chat template to the number of tokens of its image.

    Returns the tokens and the images. Raises JobFailed for an image that cannot be read, and
    when the number of image tokens and images differ.
    """
    if urls:
        check_takes_images(warm)
    mark = getattr(warm.model.config, "image_token_id", None)
    marked = [place for place, token in enumerate(ids) if token == mark and mark is not None]
    if len(marked) != len(urls):
        raise JobFailed(
            f"messages: the chat template makes {len(marked)} image tokens of {len(urls)} images"
        )
    placed: list[int] = []
    images: list[Image] = []
    copied = 0
    for place, url in zip(marked, urls, strict=True):
        placed += ids[copied:place]
        image = _image(warm, url, budget, start=len(placed))
        images.append(image)
        placed += [ids[place]] * image.num_tokens
        copied = place + 1
    return [*placed, *ids[copied:]], images


def check_takes_images(warm: WarmModel) -> None:
    """Raise JobFailed for a model without a vision encoder: it would ignore the images."""
    if not VisionEncoder.is_in(warm.model):
        raise JobFailed(
            f"messages: images must go with a model of type {' or '.join(MODEL_TYPES)}, got "
            f"{warm.name} of type {warm.model.config.model_type}"
        )


def _image(warm: WarmModel, url: str, budget: Budget, *, start: int) -> Image:
    image, size, digest = read(url, budget)
    processor = _processor(model_folder(warm.path))
    bounds = {}
    if budget.max_pixels is not None:
        smallest = min(processor.size["shortest_edge"], budget.max_pixels)
        bounds["size"] = {"shortest_edge": smallest, "longest_edge": budget.max_pixels}

    def processed(image: Any) -> Any:
        return processor(images=[image], return_tensors="pt", **bounds)

    try:
        made = processed(image)
    except ValueError as error:  # an aspect ratio above 200
        raise JobFailed(f"image: {error}") from error
    grid = made["image_grid_thw"][0].tolist()
    num_tokens = grid[0] * grid[1] * grid[2] // processor.merge_size**2
    patches = Patches(made["pixel_values"], lambda: processed(read(url, budget)[0])["pixel_values"])
    return Image(start, num_tokens, tuple(grid), patches, digest, size)


@lru_cache(maxsize=16)
def _processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    try:
        with naming("preprocessor_config.json: must be settings that transformers takes"):
            return AutoImageProcessor.from_pretrained(
                folder, backend="pil", trust_remote_code=False
            )  # torchvision is not needed
    except ValueError as error:
        reason = str(error).strip().partition("\n")[0]
        raise JobFailed(f"messages: the model has no image processor: {reason}") from error
