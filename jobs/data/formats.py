"""Records of one file: JSONL, CSV, Parquet or Arrow, by its suffix.

A file is read in pieces, never as a whole. Its records are parsed later, one by one: an unusable
record must not end the reading of a file if such records are skipped.
"""

from __future__ import annotations

import csv
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from ..errors import SpecError
from ..files import jsonl
from ..files.jsonl import MAX_LINE_BYTES, Place
from .former import Former

if TYPE_CHECKING:
    from .unpacking import Allowance


class Record(NamedTuple):
    """A record of a data set and its place."""

    place: Place
    parse: Callable[[], dict[str, Any]]  # its columns by name; raises SpecError


def records_of(
    option: str,
    path: Path,
    on_blank: Callable[[], None] = lambda: None,
    former: Former | None = None,
) -> Iterator[Record]:
    """Yield the records of a file. Blank lines are skipped; `on_blank` is called for each.

    `former`: the rules of a job that an earlier version began.

    A file with another suffix than `.csv`, `.parquet` and `.arrow` is JSONL. Raises OSError for a
    file that cannot be read and SpecError for one that is not in its format. `option`: the option
    that names the file.
    """
    suffix = path.suffix.lower()
    if suffix == ".csv":
        yield from _csv(option, path, on_blank)
    elif suffix in _OF_TABLES:
        yield from _OF_TABLES[suffix](option, path, former)
    else:
        yield from _jsonl(option, path, on_blank, former)


def _jsonl(
    option: str, path: Path, on_blank: Callable[[], None], former: Former | None
) -> Iterator[Record]:
    for place, line in jsonl.lines(option, path, on_blank):
        parse = partial(jsonl.parse, line, place)
        if former is not None:
            parse = partial(former.parsed, partial(parse, orjson.loads), parse, place)
        yield Record(place, parse)


# CSV.


def _csv(option: str, path: Path, on_blank: Callable[[], None]) -> Iterator[Record]:
    """Yield the rows below the header. Cells are text; a quoted cell may span lines."""
    csv.field_size_limit(MAX_LINE_BYTES)
    with path.open("rb") as file:
        # Python's reader, not pyarrow's: it counts lines, and does not guess that 007 is a number.
        reader = csv.reader(_decoded(option, path, file), strict=True)
        header: list[str] | None = None
        while True:
            place = Place.of_line(option, path, reader.line_num + 1)
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                # A quote that is not closed takes further lines with it.
                end = f" on line {reader.line_num}" if reader.line_num > place.line else ""
                yield Record(place, partial(_raise_fault, place, "CSV", f"{error}{end}"))
                continue
            if not cells:
                on_blank()
                continue
            if header is None:
                header = _header(cells, place)
            else:
                yield Record(place, partial(_csv_row, header, cells, place))


def _decoded(option: str, path: Path, file: Any) -> Iterator[str]:
    """Yield lines as text. Bytes that are not UTF-8 become lone surrogates, for `_csv_row`."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise Place.of_line(option, path, number).fault("at most 64 MiB", "more")
        if number == 1:
            line = line.removeprefix(jsonl.BYTE_ORDER_MARK)
        yield line.decode(errors="surrogateescape")


def _header(cells: list[str], place: Place) -> list[str]:
    if len(set(cells)) < len(cells) or "" in cells:
        raise place.fault("a header of distinct column names", ",".join(cells)[:80])
    return cells


def _csv_row(header: Sequence[str], cells: Sequence[str], place: Place) -> dict[str, Any]:
    if len(cells) != len(header):
        raise place.fault(f"{len(header)} cells, as in the header", str(len(cells)))
    for name, cell in zip(header, cells, strict=True):
        try:
            cell.encode()
        except UnicodeEncodeError as error:
            byte = ord(cell[error.start]) - 0xDC00
            raise place.field(name).fault("UTF-8", f"byte 0x{byte:02x}") from None
    return dict(zip(header, cells, strict=True))


def _raise_fault(place: Place, takes: str, got: str) -> dict[str, Any]:
    raise place.fault(takes, got)


# Parquet and Arrow.


def _parquet(option: str, path: Path, former: Former | None) -> Iterator[Record]:
    import pyarrow.parquet as pq

    from . import unpacking

    allowance = unpacking.Allowance(option, path)
    with _arrow_errors(option, path, "a Parquet file"):
        file = pq.ParquetFile(path)
    with file:
        names = _plain_columns(option, path, file.schema_arrow, former)
        with _arrow_errors(option, path, "a Parquet file"):
            num_rows = unpacking.parquet_batch_rows(file, path, allowance)
        # Arrow's threads would not survive the fork of a horse.
        batches = file.iter_batches(num_rows, columns=names, use_threads=False)
        yield from _rows(option, path, batches, allowance, former)


def _arrow(option: str, path: Path, former: Former | None) -> Iterator[Record]:
    """Yield the rows of an Arrow stream, in which `datasets` stores prepared data sets."""
    import pyarrow as pa

    from . import unpacking

    allowance = unpacking.Allowance(option, path)
    with pa.memory_map(str(path)) as file:
        with _arrow_errors(option, path, "an Arrow stream"):
            unpacking.check_arrow(file, allowance)
            file.seek(0)
            stream = pa.ipc.open_stream(file)
        names = _plain_columns(option, path, stream.schema, None)
        batches = (
            batch.slice(first, unpacking.BATCH_ROWS)
            for batch in _valid(stream, names)
            for first in range(0, batch.num_rows, unpacking.BATCH_ROWS)
        )
        yield from _rows(option, path, batches, allowance, former)


def _valid(stream: Any, names: list[str]) -> Iterator[Any]:
    """Yield the columns of record batches. pyarrow checks no offset: they could lead outside."""
    for batch in stream:
        chosen = batch.select(names)
        chosen.validate(full=True)
        yield chosen


def _plain_columns(option: str, path: Path, schema: Any, former: Former | None) -> list[str]:
    """Return the names of the columns that are read. Raises SpecError for two of one name.

    By former rules the last one of a Parquet file counts; an Arrow file was refused.
    """
    if len(set(schema.names)) < len(schema.names):
        if former is None:
            got = ",".join(schema.names)[:80]
            raise SpecError(
                option, f"{jsonl.shown(path)}: must have distinct column names, got {got}"
            )
        former.add_repeated(path)
    return [field.name for field in schema if _is_plain(field.type)]


def _rows(
    option: str, path: Path, batches: Iterator[Any], allowance: Allowance, former: Former | None
) -> Iterator[Record]:
    number = 0
    pieces = (piece for batch in batches for piece in allowance.pieces(batch))
    while True:
        with _arrow_errors(option, path, "readable to its end"):
            piece = next(pieces, None)
            rows = [] if piece is None else piece.to_pylist()
        if piece is None:
            return
        kinds = {field.name: field.type for field in piece.schema}
        for row in rows:
            number += 1
            place = Place.of_row(option, path, number)
            parse = partial(_plain_row, row, kinds, place)
            if former is not None:
                parse = partial(former.parsed, partial(_without_nulls, row), parse, place)
            yield Record(place, parse)


_OF_TABLES = {".parquet": _parquet, ".arrow": _arrow}  # by suffix


@contextmanager
def _arrow_errors(option: str, path: Path, takes: str) -> Iterator[None]:
    """Turn errors of pyarrow into a SpecError about the file.

    ValueError: pyarrow cannot convert a struct with two fields of one name.
    """
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, ValueError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise SpecError(option, f"{jsonl.shown(path)}: must be {takes}, got: {reason}") from None


def _plain_row(row: Mapping[str, Any], kinds: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Return a row as plain JSON values. `kinds`: the Arrow types of the columns. Raises SpecError.

    Null and NaN are missing values: a row has all columns of its file, and pandas writes NaN.
    """
    found = {name: _plain(value, kinds[name], place.field(name)) for name, value in row.items()}
    return {name: value for name, value in found.items() if value is not None}


def _plain(value: Any, kind: Any, place: Place) -> Any:
    if value is None or isinstance(value, str | int):
        return value
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if isinstance(value, dict):
        found = {
            name: _plain(item, kind.field(name).type, place.field(name))
            for name, item in value.items()
        }
        return {name: item for name, item in found.items() if item is not None}
    if isinstance(value, list):
        return [_plain(item, kind.value_type, place.item(i)) for i, item in enumerate(value)]
    number = float(value)  # numpy's for 16 bits
    if math.isinf(number):
        raise place.fault("a finite number", str(number))
    if math.isnan(number):
        return None
    if types.is_float64(kind) or number.is_integer():
        return number
    return _shortest(number, "e" if types.is_float16(kind) else "f")


def _shortest(number: float, form: str) -> float:
    """Return the number of fewest digits that rounds to `number` in 16 or 32 bits.

    The 32-bit number nearest to 0.1 is 0.10000000149011612 in 64 bits, and such texts would be
    learned. `form`: the precision as the module struct names it, e or f.
    """
    exact = struct.pack(form, number)
    texts = (f"{number:.{digits}g}" for digits in range(1, 10))  # 9 digits determine 32 bits
    return next(found for found in map(float, texts) if struct.pack(form, found) == exact)


def _without_nulls(value: Any) -> Any:
    """Return a value without the fields that are null, as earlier versions read it."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def left_out_columns(option: str, path: Path) -> list[str]:
    """Return the columns of a Parquet or Arrow file that are not read, with their types.

    Raises SpecError.
    """
    suffix = path.suffix.lower()
    if suffix not in (".parquet", ".arrow"):
        return []
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _arrow_errors(option, path, f"a file of {suffix}"):
        if suffix == ".parquet":
            schema = pq.read_schema(path)
        else:
            with pa.memory_map(str(path)) as file:
                schema = pa.ipc.open_stream(file).schema
    return [f"{one.name} ({str(one.type)[:40]})" for one in schema if not _is_plain(one.type)]


def _is_plain(kind: Any) -> bool:
    """Whether JSON can hold the values of an Arrow type (not images, dates and the like)."""
    from pyarrow import types

    if types.is_struct(kind):
        return all(_is_plain(kind.field(index).type) for index in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    is_number = types.is_integer(kind) or types.is_floating(kind)
    return bool(is_text or is_number or types.is_boolean(kind) or types.is_null(kind))
