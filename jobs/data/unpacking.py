"""Memory for the rows of a Parquet or Arrow file: measured before they are unpacked, and bounded.

Both formats store a repeated value once (dictionary encoding) and compress what they store, so that
a file of 100 KB can hold gigabytes. Sizes count the bytes of texts, 8 for each value, and more for
each row, which takes time however short it is. Imports pyarrow.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types

from ..errors import SpecError
from ..files.jsonl import MAX_LINE_BYTES, shown

BATCH_ROWS = 256  # in memory at a time, at most
MOST_TIMES = 1000  # times the size of the file; rows with a constant prompt of 4 KB have 300
ALWAYS_TAKEN = 256 << 20  # bytes that a file of any size may unpack to
_BATCH_BYTES = 64 << 20  # of a batch while pyarrow decodes it, by what the file says
_PIECE_BYTES = 4 << 20  # of rows that are Python objects at the same time
_VALUE_BYTES = 8
_ROW_BYTES = 128  # so that 1 KB of a large file has at most 8 rows; 1 KB of JSONL has up to 30
_PAGE_BEGIN = 16  # bytes of a Parquet page: more than its type and its size take
_DICTIONARY = 2  # type of a page

Sizes = int | NDArray[np.int64]  # (N,) bytes of each value of an array; a number: of all alike


class Allowance:
    """The bytes that the rows of one file may unpack to."""

    def __init__(self, option: str, path: Path) -> None:
        self._option, self._name = option, shown(path)
        self._most = max(ALWAYS_TAKEN, MOST_TIMES * os.path.getsize(path))
        self._left = self._most
        self._num_rows = 0  # read so far

    def check(self, num_bytes: int) -> None:
        """Raise SpecError if so many bytes are more than what is left."""
        if num_bytes > self._left:
            raise SpecError(
                self._option,
                f"{self._name}: must unpack to at most {self._most:,} bytes ({MOST_TIMES:,} times "
                f"its size, or {ALWAYS_TAKEN >> 20} MiB if that is more), got at least "
                f"{self._most - self._left + num_bytes:,}; a JSONL file has no such limit",
            )

    def pieces(self, batch: Any) -> Iterator[Any]:
        """Yield the rows of a record batch in slices of few megabytes, and count their bytes.

        Raises SpecError for too many bytes, and for a row larger than a line of JSONL may be.
        """
        sizes = np.full(batch.num_rows, _ROW_BYTES, np.int64)
        for column in batch.columns:
            sizes += _sizes(column)
        self.check(whole := int(sizes.sum()))
        self._left -= whole
        if whole <= _PIECE_BYTES:
            self._num_rows += len(sizes)
            yield batch
            return
        begin = total = 0
        for row, size in enumerate(sizes.tolist()):
            self._num_rows += 1
            if size > MAX_LINE_BYTES:
                raise SpecError(
                    self._option,
                    f"{self._name}, row {self._num_rows}: must have at most "
                    f"{MAX_LINE_BYTES >> 20} MiB, got {size:,} bytes",
                )
            if row > begin and total + size > _PIECE_BYTES:
                yield batch.slice(begin, row - begin)
                begin, total = row, 0
            total += size
        yield batch.slice(begin)


def _sizes(array: Any) -> Sizes:
    """Return the sizes of the values of an array, of a kind that JSON can hold."""
    kind = array.type
    if _is_text(kind):
        return _text_sizes(array, np.arange(len(array)))
    if types.is_struct(kind):
        return sum((_sizes(array.field(n)) for n in range(kind.num_fields)), _VALUE_BYTES)
    if types.is_dictionary(kind):
        values, indices = array.dictionary, array.indices
        if not len(values):  # all values are null
            return _VALUE_BYTES
        places = np.frombuffer(indices.buffers()[1], indices.type.to_pandas_dtype())
        places = places[indices.offset : indices.offset + len(array)]
        places = places.clip(0, len(values) - 1).astype(np.int64)  # of null it is anything
        if _is_text(values.type):
            return _text_sizes(values, places)
        sizes = _sizes(values)
        return sizes if isinstance(sizes, int) else sizes[places]
    inner: Sizes
    if types.is_fixed_size_list(kind):
        count: int = kind.list_size
        sizes = _sizes(array.values.slice(array.offset * count, len(array) * count))
        if isinstance(sizes, int):  # a list of nulls takes no room in a file: no overflow here
            return _VALUE_BYTES + min(count * sizes, MAX_LINE_BYTES)
        inner = sizes.reshape(len(array), count).sum(1)
        return _VALUE_BYTES + inner
    if types.is_list(kind) or types.is_large_list(kind):
        offsets = array.offsets.to_numpy().astype(np.int64)
        begin, end = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
        sizes = _sizes(array.values.slice(begin, end - begin))
        if isinstance(sizes, int):
            inner = np.diff(offsets) * sizes
        else:
            inner = np.diff(np.concatenate(([0], sizes.cumsum()))[offsets - begin])
        return _VALUE_BYTES + inner
    return _VALUE_BYTES


def _is_text(kind: Any) -> bool:
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return bool(is_text)


def _text_sizes(texts: Any, places: NDArray[Any]) -> Sizes:
    """Return the sizes of the texts at some places of an array, without a loop over the others."""
    places = places + texts.offset
    _, buffer, *_ = texts.buffers()
    if types.is_string_view(texts.type):
        views = np.frombuffer(buffer, np.int32).reshape(-1, 4)
        lengths = views[places, 0].astype(np.int64)
    else:
        wide = types.is_large_string(texts.type)
        offsets = np.frombuffer(buffer, np.int64 if wide else np.int32)
        lengths = offsets[places + 1].astype(np.int64) - offsets[places]
    found: Sizes = _VALUE_BYTES + lengths
    return found


# Parquet.


def parquet_batch_rows(file: Any, path: Path, allowance: Allowance) -> int:
    """Return how many rows of a Parquet file are decoded at a time. Raises SpecError.

    A value has at most the size of the page with its dictionary, or of its column where values
    continue the one before them; others are in the file as they are.
    """
    metadata = file.metadata
    total, most = 0, 1
    with path.open("rb") as raw:
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            columns = [group.column(n) for n in range(group.num_columns)]
            stored = sum(column.total_uncompressed_size for column in columns)
            total += stored
            largest = stored // max(1, group.num_rows)
            largest += sum(_largest_repeated(raw, column) for column in columns)
            most = max(most, largest)
    allowance.check(total)
    return min(BATCH_ROWS, max(1, _BATCH_BYTES // most))


def _largest_repeated(raw: Any, column: Any) -> int:
    """Return the most bytes of a value of a column that many rows can share."""
    if "DELTA_BYTE_ARRAY" in column.encodings:
        return int(column.total_uncompressed_size)
    begin = column.data_page_offset
    if column.has_dictionary_page and 0 < (offset := column.dictionary_page_offset) < begin:
        begin = offset
    raw.seek(begin)
    return _dictionary_size(raw.read(_PAGE_BEGIN))


def _dictionary_size(header: bytes) -> int:
    """Return the size of a dictionary page, decompressed, from the beginning of its header; else 0.

    The header is in Thrift's compact protocol: field 1 is the type, field 2 the size.
    """
    numbers: list[int] = []
    position = 0
    while len(numbers) < 2 and header[position : position + 1] == b"\x15":  # a 32-bit number
        number = shift = 0
        for byte in header[position + 1 :]:
            position += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        position += 1
        numbers.append((number >> 1) ^ -(number & 1))
    if len(numbers) < 2:
        return _BATCH_BYTES  # no usual header
    kind, size = numbers
    return size if kind == _DICTIONARY else 0


# Arrow.


def check_arrow(source: Any, allowance: Allowance) -> None:
    """Check that no compressed message of an Arrow stream is too large.

    pyarrow decompresses a message as a whole. Raises SpecError, and ValueError for a damaged one.
    """
    for message in pa.ipc.MessageReader.open_stream(source):
        if message.type in ("record batch", "dictionary"):
            try:
                size = _decompressed_size(message)
            except struct.error as error:
                raise ValueError(f"a buffer outside its message ({error})") from error
            allowance.check(size)


def _decompressed_size(message: Any) -> int:
    """Return the bytes of a message's buffers if they are compressed, else 0.

    The metadata is a FlatBuffers table (Message.fbs): header is a RecordBatch with buffers (offset
    and length) and compression, for a dictionary within a DictionaryBatch. A compressed buffer
    begins with its size.
    """
    data, body = memoryview(message.metadata), memoryview(message.body)
    (root,) = struct.unpack_from("<I", data)
    batch = _followed(data, _field(data, root, 2))
    if message.type == "dictionary":
        batch = _followed(data, _field(data, batch, 1))
    if not _field(data, batch, 3):
        return 0
    buffers = _followed(data, _field(data, batch, 2))
    (count,) = struct.unpack_from("<I", data, buffers)
    places = struct.iter_unpack("<qq", data[buffers + 4 : buffers + 4 + 16 * count])
    sizes = (struct.unpack_from("<q", body, offset)[0] for offset, length in places if length)
    return sum(max(0, size) for size in sizes)  # -1: this buffer is not compressed


def _field(data: memoryview, table: int, number: int) -> int:
    """Return the position of a field of a FlatBuffers table; 0 if the table has none."""
    (back,) = struct.unpack_from("<i", data, table)
    (size,) = struct.unpack_from("<H", data, table - back)
    if 4 + 2 * number >= size:
        return 0
    (offset,) = struct.unpack_from("<H", data, table - back + 4 + 2 * number)
    return table + int(offset) if offset else 0


def _followed(data: memoryview, position: int) -> int:
    """Return the position that a FlatBuffers offset leads to."""
    (offset,) = struct.unpack_from("<I", data, position)
    return position + int(offset)
