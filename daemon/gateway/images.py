"""Images in requests: only as data URLs, and none that unfolds into more pixels than it should."""

from __future__ import annotations

import base64
import binascii
import io
import struct

from ...jobs.errors import SpecError

MOST_IMAGES = 64  # in one request
MOST_PIXELS = 50_000_000  # of one image
MOST_PIXELS_TOGETHER = 200_000_000  # of one request
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def check(urls: list[str], param: str) -> None:
    """Check the images of a request by their headers; decodes nothing. Raises SpecError."""
    if len(urls) > MOST_IMAGES:
        raise SpecError(param, f"must have at most {MOST_IMAGES} images, got {len(urls)}")
    together = 0
    for number, url in enumerate(urls, start=1):
        together += _pixels(url, param, f"image {number}")
        if together > MOST_PIXELS_TOGETHER:
            raise SpecError(param, f"must have at most {MOST_PIXELS_TOGETHER:,} pixels of images")


def _pixels(url: str, param: str, which: str) -> int:
    from PIL import Image, UnidentifiedImageError

    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        # Neither a file of this machine nor an address that it would have to ask.
        raise SpecError(param, f"{which} must be a URL data:image/…;base64,…, got another one")
    try:
        raw = base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise SpecError(param, f"{which} must be base64: {error}") from error
    Image.MAX_IMAGE_PIXELS = None  # its own bound warns first; ours is below
    try:
        with Image.open(io.BytesIO(raw), formats=_FORMATS) as image:
            width, height = image.size
            frames = getattr(image, "n_frames", 1)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, struct.error):
        raise SpecError(param, f"{which} must be one of {', '.join(_FORMATS)}") from None
    if width * height * frames > MOST_PIXELS:
        raise SpecError(
            param,
            f"{which} must have at most {MOST_PIXELS:,} pixels, got {width} x {height} x {frames}",
        )
    return width * height * frames
