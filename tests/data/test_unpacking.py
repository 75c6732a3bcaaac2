"""Parquet and Arrow files that unpack to far more than their size, or lead outside themselves."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from breadth import mostly_slow

from warmd.jobs.data import unpacking
from warmd.jobs.data.formats import records_of
from warmd.jobs.errors import SpecError

_MB = 10**6


def arrow(path: Path, table: pa.Table, **options) -> Path:
    options = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(str(path), table.schema, options=options) as stream:
        stream.write_table(table)
    return path


def parquet(path: Path, table: pa.Table, **options) -> Path:
    pq.write_table(table, path, **options)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [record.parse() for record in records_of("dataset", path)]


def refusal(path: Path) -> str:
    with pytest.raises(SpecError) as error:
        read(path)
    return str(error.value).replace(str(path), "FILE")


def repeated(text: str, rows: int) -> pa.Table:
    prompts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), [text])
    return pa.table({"prompt": prompts, "completion": pa.array(["b"] * rows, pa.string())})


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_small_file_of_a_long_repeated_text_is_refused(tmp_path, suffix):
    write = parquet if suffix == ".parquet" else arrow
    path = write(tmp_path / f"rows{suffix}", repeated("x" * 100_000, 10_000))
    assert path.stat().st_size < _MB
    assert re.fullmatch(
        r"dataset: FILE: must unpack to at most 268,435,456 bytes \(1,000 times its size, or 256 "
        r"MiB if that is more\), got at least 2[6-9]\d,\d{3},\d{3}; a JSONL file has no such limit",
        refusal(path),
    )


def test_a_small_file_of_many_short_rows_is_refused(tmp_path, monkeypatch):
    """They take time, though their texts are short: two million need 80 s in `data show`."""
    monkeypatch.setattr(unpacking, "ALWAYS_TAKEN", unpacking.ALWAYS_TAKEN // 64)
    path = parquet(tmp_path / "rows.parquet", repeated("a", 2_000_000 // 64))
    assert path.stat().st_size * 1000 < unpacking.ALWAYS_TAKEN
    assert "must unpack to at most 4,194,304 bytes" in refusal(path)


def test_a_file_of_an_ordinary_repeated_prompt_is_read(tmp_path):
    path = parquet(tmp_path / "rows.parquet", repeated("a system prompt " * 60, 20_000))
    rows = read(path)
    assert len(rows) == 20_000
    assert rows[-1] == {"prompt": "a system prompt " * 60, "completion": "b"}


@pytest.mark.slow
def test_rows_with_a_long_constant_prompt_are_read(tmp_path):
    """A gigabyte of text from 4 MB: constant columns take no room, the questions do."""
    count = 250_000
    prompts = repeated("a system prompt " * 250, count).column("prompt")
    numbers = np.random.default_rng(0).integers(10**9, size=(count, 3))
    questions = pa.array([f"What is {a} times {b} plus {c}?" for a, b, c in numbers])
    constant = pa.array(["mathematics"] * count)
    table = pa.table({"system": prompts, "prompt": questions, "source": constant})
    path = parquet(tmp_path / "rows.parquet", table, compression="zstd")
    assert path.stat().st_size < 5 * _MB
    assert sum(1 for _ in records_of("dataset", path)) == count


@pytest.mark.parametrize("suffix", mostly_slow([".parquet", ".arrow"], but=[".arrow"]))
def test_a_row_larger_than_a_line_may_be_is_refused_by_its_number(tmp_path, suffix):
    table = pa.table({"text": ["a", "b", "x" * ((64 << 20) + 1)]})
    write = parquet if suffix == ".parquet" else arrow
    path = write(tmp_path / f"rows{suffix}", table)
    assert "FILE, row 3: must have at most 64 MiB, got 67,109,001 bytes" in refusal(path)


def test_a_parquet_file_is_refused_before_it_is_unpacked_if_its_columns_say_so(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(unpacking, "ALWAYS_TAKEN", 20 * _MB)
    table = pa.table({"text": ["x" * _MB] * 30})
    path = parquet(tmp_path / "rows.parquet", table, compression="zstd", use_dictionary=False)
    before = pa.total_allocated_bytes()
    rows = records_of("dataset", path)
    with pytest.raises(SpecError, match="must unpack to at most"):
        next(rows)
    assert pa.total_allocated_bytes() - before < _MB


def test_a_compressed_arrow_message_is_refused_before_it_is_decompressed(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacking, "ALWAYS_TAKEN", 20 * _MB)
    table = pa.table({"text": ["x" * _MB] * 30})
    path = arrow(tmp_path / "rows.arrow", table, compression="zstd")
    before = pa.total_allocated_bytes()
    rows = records_of("dataset", path)
    with pytest.raises(SpecError, match="must unpack to at most"):
        next(rows)
    assert pa.total_allocated_bytes() - before < _MB


def test_compressed_arrow_messages_are_read(tmp_path):
    table = pa.concat_tables([repeated("abc", 300), repeated("def", 0), repeated("ghi", 300)])
    path = arrow(tmp_path / "rows.arrow", table, compression="zstd", emit_dictionary_deltas=True)
    assert [row["prompt"] for row in read(path)] == ["abc"] * 300 + ["ghi"] * 300


@pytest.mark.parametrize(
    "options", [{}, {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"}]
)
@pytest.mark.slow
def test_long_values_are_unpacked_a_few_at_a_time(tmp_path, options):
    """256 of them would take 256 MB, and as much again in Python."""
    table = pa.table({"text": ["x" * _MB] * 250})
    path = parquet(tmp_path / "rows.parquet", table, compression="zstd", **options)
    code = (
        "import resource, sys; from pathlib import Path;"
        "from warmd.jobs.data.formats import records_of;"
        "most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024;"
        "import pyarrow.parquet, numpy; before = most();"
        "rows = sum(1 for _ in records_of('dataset', Path(sys.argv[1])));"
        "print(rows, most() - before)"
    )
    found = subprocess.check_output([sys.executable, "-c", code, path], text=True)
    rows, grown = map(int, found.split())
    assert rows == 250
    assert grown < 320, f"{grown} MB"


TEXTS = pa.array(["", "a", None, "bcd", "e" * 50, "fg"])
NUMBERS = pa.array([1, 2, None, 4, 5, 6])
ARRAYS = {
    "texts": TEXTS,
    "large texts": TEXTS.cast(pa.large_string()),
    "views": TEXTS.cast(pa.string_view()),
    "numbers": NUMBERS,
    "nulls": pa.nulls(6),
    "a dictionary": pa.DictionaryArray.from_arrays(
        pa.array([1, 3, None, 3, 4, 0], pa.int8()), TEXTS
    ),
    "a dictionary of numbers": pa.DictionaryArray.from_arrays(
        pa.array([0, 1, 3, 4, 5, 0]), NUMBERS
    ),
    "an empty dictionary": pa.DictionaryArray.from_arrays(
        pa.array([None] * 6, pa.int8()), pa.array([], pa.string())
    ),
    "objects": pa.array([{"x": "abc", "y": n} for n in range(6)]),
    "lists": pa.array([["a"], [], None, ["bcd", "e"], ["f"] * 9, ["g"]]),
    "large lists of numbers": pa.array([[1], [], None, [2] * 5, [3], []], pa.large_list(pa.int8())),
    "lists of lists": pa.array([[["a"], []], [], [["bc"]], [[]], [["d", "e"]], []]),
    "chats": pa.array([[{"role": "user", "content": "x" * n}] * n for n in range(6)]),
    "lists of a fixed size": pa.array([["a", "b" * n] for n in range(6)], pa.list_(pa.string(), 2)),
}


def size(value: object) -> int:
    """Of a value that is no null, as the module counts."""
    if isinstance(value, str):
        return 8 + len(value)
    if isinstance(value, dict):
        return 8 + sum(map(size, value.values()))
    return 8 + sum(map(size, value)) if isinstance(value, list) else 8


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("begin", [0, 1, 3])
def test_sizes_are_those_of_the_values(name, begin):
    array = ARRAYS[name].slice(begin, 3)
    found = unpacking._sizes(array)
    sizes = [found] * 3 if isinstance(found, int) else found.tolist()
    for value, counted in zip(array.to_pylist(), sizes, strict=True):
        assert counted == size(value) if value is not None else counted >= 8


def test_an_empty_array_has_no_sizes():
    for array in ARRAYS.values():
        found = unpacking._sizes(array.slice(2, 0))
        assert isinstance(found, int) or not len(found)


def test_lists_of_many_nulls_are_refused(tmp_path):
    """They take no room in the file."""
    inner = pa.FixedSizeListArray.from_arrays(pa.nulls(2**30), 2**30)
    outer = pa.FixedSizeListArray.from_arrays(inner, 1)
    path = arrow(tmp_path / "rows.arrow", pa.table({"x": outer}))
    assert "FILE, row 1: must have at most 64 MiB" in refusal(path)


OFFSETS = struct.pack("<4i", 0, 4, 8, 12)


@pytest.mark.parametrize("offset", [2**30, -(2**30)])
def test_offsets_that_lead_outside_an_arrow_file_are_refused(tmp_path, offset):
    path = arrow(tmp_path / "rows.arrow", pa.table({"text": ["aaaa", "bbbb", "cccc"]}))
    content = path.read_bytes()
    wild = struct.pack("<4i", 0, 4, offset, offset + 4)
    path.write_bytes(content.replace(OFFSETS, wild))
    code = (
        "import sys; from pathlib import Path; from warmd.jobs.data.formats import records_of;"
        "list(records_of('dataset', Path(sys.argv[1])))"
    )
    ended = subprocess.run([sys.executable, "-c", code, path], stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1, ended  # without a signal
    assert "must be readable to its end, got: In column 0" in ended.stderr
