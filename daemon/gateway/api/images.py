"""Images in requests: as data URLs, and as files below a folder that is configured for it.

None unfolds into more pixels than it should. A job is given what was checked here, by the place of
its copy: what a file's name stands for later is nothing that it could be made to read.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import os
import stat
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from ....jobs.engine.images import FILE
from ....jobs.errors import SpecError
from ...host.image_store import ImageStore

MOST_IMAGES = 64  # in one request
MOST_PIXELS = 50_000_000  # of one image
MOST_PIXELS_TOGETHER = 200_000_000  # of one request
MOST_BYTES = 50_000_000  # of one file, and of all of a request; its own size has a limit, too
MOST_COMPUTED_S = (
    2.0  # on the headers of a request's images: milliseconds, unless made to take long
)
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_HEADER = 1024**2  # bytes in which an image says how large it is, after all that it says besides
_STEP = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class Named(Protocol):
    """What names an image."""

    url: str


def take(
    images: Iterable[Named], param: str, files: Path | None, store: ImageStore
) -> dict[Path, bytes]:
    """Check the images of a request by their headers; have their URLs name places in the store.

    Returns what is to be stored there. Decodes nothing. Raises SpecError. `files`: the folder below
    which file:// URLs may name images; None: no such URL is taken.
    """
    images = list(images)
    if len(images) > MOST_IMAGES:
        raise SpecError(param, f"must have at most {MOST_IMAGES} images, got {len(images)}")
    taken: dict[Path, bytes] = {}
    together, began = 0, time.thread_time()
    for number, image in enumerate(images, start=1):
        which = f"image {number}"
        raw = _bytes(image.url, param, which, files)
        together += _pixels(raw, param, which)
        if together > MOST_PIXELS_TOGETHER:
            raise SpecError(param, f"must have at most {MOST_PIXELS_TOGETHER:,} pixels of images")
        if time.thread_time() - began > MOST_COMPUTED_S:
            raise SpecError(param, f"{which} must have a header that is read in no time")
        place = store.place_of(raw)
        taken[place] = raw
        image.url = f"{FILE}{place}"
        if sum(map(len, taken.values())) > MOST_BYTES:
            raise SpecError(param, f"must have at most {MOST_BYTES:,} bytes of images")
    return taken


def _bytes(url: str, param: str, which: str, files: Path | None) -> bytes:
    return _file(url, param, which, files) if url.startswith(FILE) else _data(url, param, which)


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
    # Alike for what is not there: nothing is told of other folders.
    with contextlib.suppress(OSError, ValueError):
        return _read_below(files, Path(url.removeprefix(FILE)).relative_to(files).parts)
    raise SpecError(
        param, f"{which} must be a file below {files}, without links, of {MOST_BYTES:,} bytes"
    )


def _read_below(folder: Path, parts: tuple[str, ...]) -> bytes:
    """Read a file below a folder. Raises OSError and ValueError.

    Step by step, each from the folder that is open and never through a link: whoever exchanges a
    part of the path meanwhile has nothing of it.
    """
    if not parts or ".." in parts:
        raise ValueError("not below the folder")
    with contextlib.ExitStack() as opened:
        at = os.open(folder, _STEP | os.O_DIRECTORY)
        opened.callback(os.close, at)
        for part in parts[:-1]:
            at = os.open(part, _STEP | os.O_DIRECTORY, dir_fd=at)
            opened.callback(os.close, at)
        # A pipe would be waited for.
        with open(os.open(parts[-1], _STEP | os.O_NONBLOCK, dir_fd=at), "rb") as file:
            found = os.fstat(file.fileno())
            # Another name of the same file may be anywhere.
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                raise ValueError("not a file of its own")
            raw = file.read(MOST_BYTES + 1)
            if len(raw) > MOST_BYTES:
                raise ValueError("too large")
            return raw


def _pixels(raw: bytes, param: str, which: str) -> int:
    from PIL import Image, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # its own bound warns first; ours is below
    # Its reader of WebP is quick, and wants all.
    header = raw if raw[8:12] == b"WEBP" else raw[:_HEADER]
    try:
        with Image.open(io.BytesIO(header), formats=_FORMATS) as image:
            width, height = image.size
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, struct.error):
        raise SpecError(param, f"{which} must be one of {', '.join(_FORMATS)}") from None
    if width * height > MOST_PIXELS:
        raise SpecError(
            param, f"{which} must have at most {MOST_PIXELS:,} pixels, got {width} x {height}"
        )
    return width * height
