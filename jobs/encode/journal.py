"""The embeddings or scores of an encode job: an append-only journal, and the output file.

Passages are encoded in order of length, so the journal is unordered.
A killed job resumes from it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
from numpy.typing import NDArray

from ..files import journal
from ..files.atomic import whole_file
from .passages import Passage

Floats = NDArray[np.float32]
Columns = dict[str, NDArray[Any]]  # by name, each (N,) or (N, width)


class Journal(journal.Journal):
    """Append-only file of embeddings.

    A file with another `identity` (a hash of passages, model and options) is discarded.
    """

    def __init__(self, path: Path, identity: bytes, width: int) -> None:
        self.dtype = np.dtype(
            [("row", "<i8"), ("tokens", "<i4"), ("cut", "?"), ("vector", "<f4", (width,))]
        )
        self._begin = len(identity)
        size = path.stat().st_size if path.exists() else 0
        self.is_stale = size > 0 and not journal.begins_with(path, identity)
        whole = 0 if self.is_stale else max(0, size - self._begin) // self.dtype.itemsize
        is_new = self.is_stale or size < self._begin
        super().__init__(path, 0 if is_new else self._begin + whole * self.dtype.itemsize)
        if is_new:
            self.write(identity)

    def add(
        self, rows: Sequence[int], tokens: Sequence[int], cut: Sequence[bool], vectors: Floats
    ) -> None:
        """Append the vectors (n, width) of the texts with these numbers.

        Raises OSError without an effect.
        """
        records = np.empty(len(rows), self.dtype)
        records["row"], records["tokens"], records["cut"] = rows, tokens, cut
        records["vector"] = vectors
        self.write(records.tobytes())

    def read(self) -> NDArray[Any]:
        """Return the records (n,), ordered by the number of the text, each text once."""
        records = np.fromfile(self.path, self.dtype, offset=self._begin)
        records = records[records["tokens"] > 0]  # a power failure may leave zeros
        return records[np.unique(records["row"], return_index=True)[1]]

    def remove(self) -> None:
        """Delete the file, once its vectors are in the output."""
        self.path.unlink()


def write(
    path: Path,
    passages: Sequence[Passage],
    records: NDArray[Any],
    *,
    are_scores: bool = False,
    mode: int = 0o600,
) -> None:
    """Write one row per passage in the format of the name, whole or not at all.

    .jsonl        {"id", "file", "tokens", "cut", "embedding"} per row; `file` for code blocks only
    .npz          arrays `embeddings` (N, width) float32, `ids` and `files` (N,), `tokens`, `cut`
    .safetensors  the same numbers, with `ids` and `files` as JSON lists in the metadata

    Scores: `score` in place of `embedding`, and an array `scores` (N,).
    """
    columns = {
        "tokens": np.ascontiguousarray(records["tokens"]),
        "cut": np.ascontiguousarray(records["cut"]),
    }
    if are_scores:
        columns["scores"] = np.ascontiguousarray(records["vector"][:, 0])
    else:
        columns["embeddings"] = np.ascontiguousarray(records["vector"])
    with whole_file(path, mode=mode) as file:
        _WRITERS[path.suffix](file, passages, columns)


def plain(vectors: Floats) -> list[list[float]]:
    """Return vectors as lists whose numbers, in JSON, are as short as float32 allows."""
    exact: list[list[float]] = orjson.loads(
        orjson.dumps(np.ascontiguousarray(vectors), option=orjson.OPT_SERIALIZE_NUMPY)
    )
    return exact


def _write_jsonl(file: BinaryIO, passages: Sequence[Passage], columns: Columns) -> None:
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    for number, passage in enumerate(passages):
        row: dict[str, Any] = {"id": passage.id}
        if passage.file is not None:
            row["file"] = passage.file
        row["tokens"] = int(columns["tokens"][number])
        row["cut"] = bool(columns["cut"][number])
        if "scores" in columns:
            row["score"] = columns["scores"][number]
        else:
            row["embedding"] = columns["embeddings"][number]
        file.write(orjson.dumps(row, option=option))


def _write_npz(file: BinaryIO, passages: Sequence[Passage], columns: Columns) -> None:
    names = {
        "ids": np.array([passage.id for passage in passages], np.str_),
        "files": np.array([passage.file or "" for passage in passages], np.str_),
    }
    np.savez(file, allow_pickle=False, **names, **columns)


def _write_safetensors(file: BinaryIO, passages: Sequence[Passage], columns: Columns) -> None:
    from safetensors.numpy import save

    names = {"ids": [p.id for p in passages], "files": [p.file or "" for p in passages]}
    metadata = {name: orjson.dumps(values).decode() for name, values in names.items()}
    file.write(save(columns, metadata))


_WRITERS = {".jsonl": _write_jsonl, ".npz": _write_npz, ".safetensors": _write_safetensors}
