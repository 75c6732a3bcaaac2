"""Images in requests: data URLs, and file URLs below the folder `http_files`.

The headers are checked against pixel limits before anything is decoded. The job reads a copy of
the checked bytes, so exchanging the file afterwards has no effect.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import stat
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from ....jobs.errors import SpecError
from ....jobs.models.image_parts import FILE
from ...host.image_store import ImageStore

MAX_IMAGES = 64  # in one request
MAX_PIXELS = 50_000_000  # of one image
MAX_PIXELS_TOGETHER = 200_000_000  # of one request
MAX_BYTES = 50_000_000  # of one file, and of all images of one request
MAX_COMPUTED_S = 2.0  # CPU time for all headers of a request; milliseconds unless crafted
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_HEADER = 1024**2  # bytes that must hold the image size, metadata before it included
_STEP = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class HasUrl(Protocol):
    """A part of a request that refers to an image."""

    url: str


def collect(
    images: Iterable[HasUrl], param: str, files: Path | None, store: ImageStore | None
) -> dict[Path, bytes]:
    """Check the headers of a request's images and point their URLs at paths in the image store.

    Returns the bytes to store under each path. Decodes nothing. Raises SpecError. `files` is the
    folder below which file:// URLs are allowed (None: not allowed). Without a `store` the images
    become data URLs: another machine, without this disk, may answer.
    """
    images = list(images)
    if len(images) > MAX_IMAGES:
        raise SpecError(param, f"must have at most {MAX_IMAGES} images, got {len(images)}")
    taken: dict[Path, bytes] = {}
    together, began = 0, time.thread_time()
    for number, image in enumerate(images, start=1):
        which = f"image {number}"
        raw = _bytes(image.url, param, which, files)
        together += _pixels(raw, param, which)
        if together > MAX_PIXELS_TOGETHER:
            raise SpecError(param, f"must have at most {MAX_PIXELS_TOGETHER:,} pixels of images")
        if time.thread_time() - began > MAX_COMPUTED_S:
            raise SpecError(param, f"{which}: its header takes too long to read")
        place = Path(str(number)) if store is None else store.place_of(raw)
        taken[place] = raw
        if store is not None:
            image.url = f"{FILE}{place}"
        elif image.url.startswith(FILE):
            image.url = f"data:image/any;base64,{base64.b64encode(raw).decode()}"
        if sum(map(len, taken.values())) > MAX_BYTES:
            raise SpecError(param, f"must have at most {MAX_BYTES:,} bytes of images")
    return {} if store is None else taken


def _bytes(url: str, param: str, which: str, files: Path | None) -> bytes:
    return _file(url, param, which, files) if url.startswith(FILE) else _data(url, param, which)


def _data(url: str, param: str, which: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        # Neither local files nor addresses that the gateway would have to fetch.
        raise SpecError(param, f"{which} must be a URL data:image/…;base64,…, got {url[:40]!r}")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise SpecError(param, f"{which} must be base64: {error}") from error


def _file(url: str, param: str, which: str, files: Path | None) -> bytes:
    if files is None:
        raise SpecError(
            param, f"{which} must be a data: URL: file:// URLs need the setting http_files"
        )
    # The same error for missing files: it must not reveal what exists elsewhere.
    with contextlib.suppress(OSError, ValueError):
        return _read_below(files, Path(url.removeprefix(FILE)).relative_to(files).parts)
    raise SpecError(
        param, f"{which} must be a file below {files}, no link, of at most {MAX_BYTES:,} bytes"
    )


def _read_below(folder: Path, parts: tuple[str, ...]) -> bytes:
    """Read a file below a folder. Raises OSError and ValueError.

    Each path component is opened relative to the open folder before it (openat, O_NOFOLLOW), so
    replacing a component by a link meanwhile has no effect.
    """
    if not parts or ".." in parts:
        raise ValueError("not below the folder")
    with contextlib.ExitStack() as opened:
        at = os.open(folder, _STEP | os.O_DIRECTORY)
        opened.callback(os.close, at)
        for part in parts[:-1]:
            at = os.open(part, _STEP | os.O_DIRECTORY, dir_fd=at)
            opened.callback(os.close, at)
        # O_NONBLOCK: opening a named pipe would otherwise wait for its writer.
        with open(os.open(parts[-1], _STEP | os.O_NONBLOCK, dir_fd=at), "rb") as file:
            found = os.fstat(file.fileno())
            # A file with several hard links may belong to another folder.
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                raise ValueError("not a regular file with one link")
            raw = file.read(MAX_BYTES + 1)
            if len(raw) > MAX_BYTES:
                raise ValueError("too large")
            return raw


def _pixels(raw: bytes, param: str, which: str) -> int:
    from PIL import Image, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # Pillow's limit only warns at first; ours is below
    # Pillow's WebP reader needs the whole file, and is fast.
    header = raw if raw[8:12] == b"WEBP" else raw[:_HEADER]
    try:
        with Image.open(io.BytesIO(header), formats=_FORMATS) as image:
            width, height = image.size
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, struct.error):
        raise SpecError(param, f"{which} must be one of {', '.join(_FORMATS)}") from None
    if width * height > MAX_PIXELS:
        raise SpecError(
            param, f"{which} must have at most {MAX_PIXELS:,} pixels, got {width} x {height}"
        )
    return width * height
