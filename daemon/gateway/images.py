"""Images in requests: as data URLs, and as files below a folder that is configured for it.

None unfolds into more pixels than it should.
"""

from __future__ import annotations

import base64
import binascii
import io
import struct
from pathlib import Path

from ...jobs.errors import SpecError
from ...jobs.pictures import FILE

MOST_IMAGES = 64  # in one request
MOST_PIXELS = 50_000_000  # of one image
MOST_PIXELS_TOGETHER = 200_000_000  # of one request
MOST_BYTES = 50_000_000  # of one file; a request's own size has a limit of its own
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def check(urls: list[str], param: str, files: Path | None) -> None:
    """Check the images of a request by their headers; decodes nothing. Raises SpecError.

    `files`: the folder below which file:// URLs may name images; None: no such URL is taken.
    """
    if len(urls) > MOST_IMAGES:
        raise SpecError(param, f"must have at most {MOST_IMAGES} images, got {len(urls)}")
    together = 0
    for number, url in enumerate(urls, start=1):
        which = f"image {number}"
        raw = _file(url, param, which, files) if url.startswith(FILE) else _data(url, param, which)
        together += _pixels(raw, param, which)
        if together > MOST_PIXELS_TOGETHER:
            raise SpecError(param, f"must have at most {MOST_PIXELS_TOGETHER:,} pixels of images")


def _data(url: str, param: str, which: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        # Neither a file of this machine nor an address that it would have to ask.
        raise SpecError(param, f"{which} must be a URL data:image/…;base64,…, got another one")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise SpecError(param, f"{which} must be base64: {error}") from error


def _file(url: str, param: str, which: str, files: Path | None) -> bytes:
    if files is None:
        raise SpecError(
            param, f"{which} must be a data: URL: file:// is for where http_files is set"
        )
    # The job reads the path as it stands here: no links out of the folder, no .. and no %2e.
    path = Path(url.removeprefix(FILE))
    try:
        is_within = str(path.resolve(strict=True)) == str(path) and path.is_relative_to(files)
        if is_within and path.is_file() and path.stat().st_size <= MOST_BYTES:
            return path.read_bytes()
    except (OSError, ValueError):
        pass  # alike for what is not there: nothing is told of other folders
    raise SpecError(
        param, f"{which} must be a file below {files}, without links, of {MOST_BYTES:,} bytes"
    )


def _pixels(raw: bytes, param: str, which: str) -> int:
    from PIL import Image, UnidentifiedImageError

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
