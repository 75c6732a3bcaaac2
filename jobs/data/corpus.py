"""Tokenized data sets: token arrays on disk, built once and memory-mapped by every job.

The folder of a corpus is named by a hash of its inputs (content of the data, tokenizer, lengths),
so it is never stale. An example has columns of equal length (`ids`, and others per token). A folder
is written atomically, by one process while others wait. The least recently used folders are removed
when all together exceed MAX_BYTES. Imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import orjson
from numpy.typing import NDArray

from ..errors import JobFailed
from ..files.atomic import locked, whole_folder

FOLDER = "corpora"  # in the cache of a home
MAX_BYTES = 20 * 10**9  # of all corpora of a home
SCHEMA = 1  # of the files below; part of every name

Array = NDArray[Any]


@dataclass(frozen=True)
class Corpus:
    """Memory-mapped examples; the train/validation split is by document."""

    folder: Path
    columns: Mapping[str, Array]  # each of all examples, one after another: (num_tokens,)
    offsets: Array  # (num_examples + 1,) int64: where an example begins
    train: Array  # int64: the numbers of the examples to train on
    validation: Array  # int64: of those that are held out
    facts: Mapping[str, Any]  # statistics of the builder
    is_new: bool  # whether this call has built it

    @property
    def name(self) -> str:
        """The hash of its inputs."""
        return self.folder.name

    @property
    def lengths(self) -> Array:
        """The tokens of every example."""
        return np.diff(self.offsets)

    def example(self, number: int) -> dict[str, Array]:
        """Return the columns of one example."""
        begin, end = self.offsets[number], self.offsets[number + 1]
        return {name: column[begin:end] for name, column in self.columns.items()}


class Writer:
    """Writes the examples of a corpus sequentially, without holding them in memory."""

    def __init__(self, folder: Path, dtypes: Mapping[str, str]) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {}
        self._dtypes = dtypes
        self._files: dict[str, BinaryIO] = {}
        self._lengths: list[int] = []
        self._held_out: list[bool] = []

    def __enter__(self) -> Self:
        self._files = {name: (self.folder / f"{name}.bin").open("wb") for name in self._dtypes}
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, example: Mapping[str, Any], *, held_out: bool) -> None:
        """Write an example: one sequence per column, all of one length."""
        (length,) = {len(values) for values in example.values()}
        for name, dtype in self._dtypes.items():
            self._files[name].write(np.asarray(example[name], dtype).tobytes())
        self._lengths.append(length)
        self._held_out.append(held_out)

    def finish(self) -> None:
        """Write the index files."""
        np.save(self.folder / "lengths.npy", np.array(self._lengths, np.int32))
        np.save(self.folder / "held_out.npy", np.array(self._held_out, np.bool_))
        (self.folder / "corpus.json").write_bytes(
            orjson.dumps({"dtypes": dict(self._dtypes), "facts": self.facts})
        )


def open_or_build(
    cache: Path,
    key: Mapping[str, Any],
    dtypes: Mapping[str, str],
    build: Callable[[Writer], None],
    check_stop: Callable[[], None],
) -> Corpus:
    """Return the corpus of `key` from `cache`, or build it with `build`.

    A second process that needs the same corpus waits for the first; `check_stop` is called
    meanwhile and raises when the job is to stop. Raises JobFailed for a corpus without training
    examples, and when the disk is full.
    """
    digest = hashlib.sha256(orjson.dumps([SCHEMA, key], option=orjson.OPT_SORT_KEYS)).hexdigest()
    folder = cache / digest[:32]
    found = _open(folder, is_new=False)
    if found is not None:
        return found
    is_new = False
    try:
        with suppress(_BuiltMeanwhile), whole_folder(folder, while_waiting=check_stop) as staging:
            if _open(folder, is_new=False) is not None:
                raise _BuiltMeanwhile
            with Writer(staging, dtypes) as writer:
                build(writer)
                writer.finish()
            if not any(not is_held_out for is_held_out in writer._held_out):
                raise JobFailed("data: it has no example to train on")
            is_new = True
    except Exception as error:
        number = _os_error(error)
        if number not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise JobFailed(
            f"data: no room for its tokens in {cache}: {os.strerror(number)}; `warmd data clear` "
            "removes those of other jobs"
        ) from error
    remove_oldest(cache, MAX_BYTES, keep=folder)
    corpus = _open(folder, is_new=is_new)
    assert corpus is not None
    return corpus


def _os_error(error: Exception) -> int | None:
    """The number of an error of the operating system; the library of tokenizers has it in words."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return None if found is None else int(found[1])


class _BuiltMeanwhile(Exception):
    """Another process built the corpus; leaves `whole_folder` without replacing it."""


def _open(folder: Path, *, is_new: bool) -> Corpus | None:
    """Map a corpus; return None when it is missing or incomplete."""
    try:
        about = orjson.loads((folder / "corpus.json").read_bytes())
        offsets = np.concatenate(([0], np.cumsum(np.load(folder / "lengths.npy"), dtype=np.int64)))
        held_out = np.load(folder / "held_out.npy")
        columns = {
            name: np.memmap(folder / f"{name}.bin", dtype, "r", shape=(int(offsets[-1]),))
            for name, dtype in about["dtypes"].items()
        }
    except (OSError, ValueError, KeyError):
        return None
    with suppress(OSError):
        os.utime(folder)  # `remove_oldest` uses this time
    return Corpus(
        folder=folder,
        columns=columns,
        offsets=offsets,
        train=np.flatnonzero(~held_out),
        validation=np.flatnonzero(held_out),
        facts=about["facts"],
        is_new=is_new,
    )


# The cache.


def size_bytes(folder: Path) -> int:
    """Return the size of the files of a folder; 0 for one that is gone."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def remove_oldest(cache: Path, most_bytes: int, *, keep: Path | None = None) -> int:
    """Remove the least recently used corpora until all together fit; return the bytes freed.

    A job that has mapped one keeps its content. A removal that is killed leaves an incomplete
    corpus, which is built again when needed.
    """
    if not cache.is_dir():
        return 0
    with locked(cache):
        found = [path for path in cache.iterdir() if path.is_dir() and path.name[0] != "."]
        sizes = {path: size_bytes(path) for path in sorted(found, key=_used_at)}
        freed, surplus = 0, sum(sizes.values()) - most_bytes
        for path, size in sizes.items():
            if freed >= surplus:
                break
            if path != keep:
                shutil.rmtree(path, ignore_errors=True)
                freed += size
    return freed


def _used_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


# Hashes of inputs.


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a hash of a tokenizer of transformers without its truncation and padding state."""
    core = orjson.loads(tokenizer.backend_tokenizer.to_str())
    core |= {"truncation": None, "padding": None}
    return hashlib.sha256(orjson.dumps(core, option=orjson.OPT_SORT_KEYS)).hexdigest()
