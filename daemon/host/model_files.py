"""Which files a model is read from: whether they are still the same, and a digest of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson
import xxhash

from ...jobs.files import records
from ...jobs.files.atomic import make_folder, write_atomic
from ...jobs.models.adapters import model_folder
from ...jobs.models.folder_files import NOT_READ, SUFFIXES, TEMPLATES

_BLOCK_BYTES = 2**22


def weights(folder: Path, *, with_base: bool = True) -> list[Path]:
    """The safetensors files of a model: they are mapped, not read.

    `with_base`: for an adapter also those of its base.
    """
    return [
        path
        for path in _files(folder)
        if path.suffix == ".safetensors" and (with_base or path.parent == folder)
    ]


def fingerprint(folder: Path, response_template: str | None = None) -> str:
    """Identity, size and times of every file that a model in `folder` is read from.

    `response_template`: a further file of it. Raises OSError.

    It costs a few microseconds a file, so it is computed for each job. A change of the content that
    keeps size and modification time shows in the time of the last status change.
    """
    hashed = xxhash.xxh3_128()
    more = () if response_template is None else (Path(response_template),)
    for path in (*_files(folder), *_more_templates(folder), *more):
        found = path.stat()
        identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        hashed.update(f"{path}\0{identity}\0".encode())
    return hashed.hexdigest()


def digest(folder: Path, kept: Path | None) -> str:
    """Return "xxh3:" and the XXH3 (128 bits) of names and contents, which identifies the model.

    It does not protect against deliberate collisions. It reads all files, so the result is cached
    in the folder `kept`, with the fingerprint.
    """
    return _digests(folder, kept).digest


def weights_digest(folder: Path, kept: Path | None) -> str:
    """Return the digest of the weight files alone; `kept` as in `digest`."""
    return _digests(folder, kept).weights


@dataclass(frozen=True)
class _Digests:
    fingerprint: str  # of the files that were read
    digest: str
    weights: str


def _digests(folder: Path, kept: Path | None) -> _Digests:
    if kept is None:
        return _read_digests(folder, "")
    now = fingerprint(folder)
    place = kept / f"{xxhash.xxh3_64_hexdigest(bytes(folder))}.json"
    known = records.read(place, _Digests)  # one of an earlier version has no weights
    if known is not None and known.fingerprint == now:
        return known
    found = _read_digests(folder, now)
    try:
        make_folder(kept)
        write_atomic(place, orjson.dumps(found))
    except OSError:
        pass  # no room: it is read again the next time
    return found


def _read_digests(folder: Path, now: str) -> _Digests:
    whole, weights = xxhash.xxh3_128(), xxhash.xxh3_128()
    for path in _files(folder):
        hashes = [whole, weights] if path.suffix == ".safetensors" else [whole]
        for hashed in hashes:
            hashed.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with open(path, "rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                for hashed in hashes:
                    hashed.update(block)
    return _Digests(now, f"xxh3:{whole.hexdigest()}", f"xxh3:{weights.hexdigest()}")


def _more_templates(folder: Path) -> Iterator[Path]:
    """Yield the files of the folders with further chat templates."""
    for place in {folder: None, model_folder(folder): None}:
        with suppress(FileNotFoundError, NotADirectoryError):
            yield from filter(Path.is_file, sorted((place / TEMPLATES).iterdir()))


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files in the folder, and in that of an adapter's base, in a fixed order."""
    base = model_folder(folder)
    for place in (folder,) if base == folder else (folder, base):
        with os.scandir(place) as entries:
            names = sorted(e.name for e in entries if os.path.splitext(e.name)[1] in SUFFIXES)
        names = [name for name in names if name not in NOT_READ]
        yield from (place / name for name in names if (place / name).is_file())
