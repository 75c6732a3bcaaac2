"""Reads images of chats, from files and data URLs, within size limits. Imports Pillow, no torch."""

from __future__ import annotations

import base64
import hashlib
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import JobFailed, SpecError
from ..models.folder_files import BadFile, read_bytes
from ..models.image_parts import FILE

if TYPE_CHECKING:
    from PIL.Image import Image

MODEL_TYPES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
)  # model_type in config.json
MAX_PIXELS = 2**26  # 67 million, before resizing: a decompression bomb has many more
_MOST_BYTES = 512 << 20  # of a file


@dataclass(frozen=True)
class Budget:
    """Size limits of an image for the model; larger ones are resized."""

    thumbnail: int | None = None  # longer side, in pixels
    max_pixels: int | None = None


def check_model(config: Mapping[str, Any], field: str) -> None:
    """Check that a model takes images, by its config.json. Raises SpecError."""
    if config.get("model_type") not in MODEL_TYPES:
        raise SpecError(
            field,
            f"images must go with a model of type {' or '.join(MODEL_TYPES)}, got one of type "
            f"{config.get('model_type')}",
        )


def check(path: str) -> None:
    """Check that a file is an image, by its header. Raises SpecError."""
    try:
        _open(read_bytes(Path(path), _MOST_BYTES), path)
    except OSError as error:
        raise SpecError("image", f"must be a file, got {path}: {error.strerror}") from error
    except BadFile as error:
        raise SpecError("image", f"must be an image: {error}") from error
    except JobFailed as error:
        raise SpecError("image", f"must be an image: {error}") from error


def read(url: str, budget: Budget) -> tuple[Image, tuple[int, int], int]:
    """Return an image in RGB, its width and height before resizing, and a digest (63 bits).

    The EXIF orientation is applied. Raises JobFailed for anything but an image within MAX_PIXELS.
    """
    from PIL import Image, ImageOps

    data = _bytes(url)
    image = _open(data, "the image")
    try:
        ImageOps.exif_transpose(image, in_place=True)  # cameras store the orientation
        converted = image.convert("RGB")
    except Exception as error:  # a corrupt file: decoders raise anything
        raise JobFailed(f"image: it cannot be read: {error}") from error
    size = converted.size
    if budget.thumbnail is not None:
        converted.thumbnail((budget.thumbnail, budget.thumbnail), Image.Resampling.LANCZOS)
    digest = hashlib.sha256(data + repr(budget).encode()).digest()
    return converted, size, int.from_bytes(digest[:8]) >> 1


def _bytes(url: str) -> bytes:
    if url.startswith(FILE):
        try:
            return read_bytes(Path(url.removeprefix(FILE)), _MOST_BYTES)
        except (OSError, ValueError) as error:
            raise JobFailed(f"image: {error}") from error
    kind, _, data = url.partition(",")
    if not kind.endswith(";base64"):
        raise JobFailed("image: a data URL must be in base64")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise JobFailed(f"image: its data URL is not base64: {error}") from error


def _open(data: bytes, name: str) -> Image:
    """Read the header of an image. Raises JobFailed."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:  # its message has an address in memory
        raise JobFailed(f"image: {name} cannot be read: it has no known format") from error
    except Exception as error:  # a corrupt file: decoders raise anything
        raise JobFailed(f"image: {name} cannot be read: {error}") from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise JobFailed(
            f"image: {name} must have at most {MAX_PIXELS} pixels, got {width}x{height}"
        )
    return image
