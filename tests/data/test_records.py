"""Records: the same rows in every format, renamed columns, and one-line errors for bad records."""

from __future__ import annotations

import math
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from warmd.jobs.data import left_out
from warmd.jobs.data.columns import Columns
from warmd.jobs.data.reader import Reader, Reading
from warmd.jobs.data.sources import TAKES, records
from warmd.jobs.errors import SpecError

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": 'say "hi",\nplease', "answer": "hi"}]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format of the file name's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    elif path.suffix == ".csv":
        Dataset.from_list(rows).to_csv(str(path))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def read(source: Path | str, *columns: str) -> list[dict[str, Any]]:
    reader = Reader(lambda values, _: dict(values), Reading(Columns.parse(columns)))
    return list(reader.rows("dataset", str(source)))


def refusal(source: Path, *columns: str) -> str:
    with pytest.raises(SpecError) as caught:
        read(source, *columns)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(source), "FILE")


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_every_format_gives_the_same_rows(tmp_path, suffix):
    path = write(tmp_path / f"rows{suffix}", ROWS)
    assert read(path) == ROWS
    assert read(path, "prompt=question") == [
        {"prompt": row["question"], "answer": row["answer"]} for row in ROWS
    ]


def test_a_folder_is_read_file_by_file_in_the_order_of_the_names(tmp_path):
    for number, suffix in enumerate([".csv", ".parquet", ".jsonl"]):
        write(tmp_path / "rows" / f"{number}{suffix}", [{"question": str(number)}])
    (tmp_path / "rows" / "README.txt").write_text("not a data set")
    write(tmp_path / "rows" / "more" / "9.jsonl", [{"question": "9"}])
    assert [row["question"] for row in read(tmp_path / "rows")] == ["0", "1", "2", "9"]


def test_columns_can_be_swapped_and_the_others_stay(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "b", "level": 3}])
    assert read(path, "prompt=answer,answer=prompt") == [{"prompt": "b", "answer": "a", "level": 3}]
    assert read(path, "prompt=answer", "answer=prompt") == read(path, "prompt=answer,answer=prompt")


def test_a_record_without_a_named_column_is_refused_by_the_columns_own_name(tmp_path):
    path = write(tmp_path / "rows.csv", [{"problem": "a"}])
    assert refusal(path, "question=task") == (
        "dataset: FILE, line 2: must be an object with task (columns), got the keys ['problem']"
    )


@pytest.mark.parametrize("text", ["question", "=problem", "question=", "a=b,,c=d", "a=b,a=c"])
def test_column_names_are_pairs(text):
    with pytest.raises(SpecError, match=r"^columns: must "):
        Columns.parse([text])


def test_csv_cells_are_text_and_lines_are_counted_through_quoted_cells(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbfa,b\r\n007,"x\ny"\r\n\r\n1\r\n')
    rows = records("dataset", str(path))
    assert next(rows).parse() == {"a": "007", "b": "x\ny"}
    assert next(rows).place.line == 5
    assert refusal(path) == "dataset: FILE, line 5: must be 2 cells, as in the header, got 1"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,a\n1,2\n", "line 1: must be a header of distinct column names, got a,a"),
        (b"a,b\n1,caf\xe9\n", "line 2: b: must be UTF-8, got byte 0xe9"),
        (b'a\n"b"c\n', "line 2: must be CSV, got "),
        (b'a\n"b\n', "line 2: must be CSV, got unexpected end of data"),
        (
            b'a,b\n1,"2\n3,4\n5,"6"\n7,8\n',
            "line 2: must be CSV, got ',' expected after '\"' on line 4",
        ),
    ],
)
def test_a_bad_line_of_csv_is_named(tmp_path, content, message):
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    assert refusal(path).startswith(f"dataset: FILE, {message}")


def test_only_the_bad_line_of_a_csv_is_skipped(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'a,b\n1,2\n3\n"4"x,5\n6,caf\xe9\n7,8\n')
    reading = Reading(skips_bad_rows=True)
    rows = Reader(lambda values, _: values["a"], reading).rows("dataset", str(path))
    assert list(rows) == ["1", "7"]
    assert reading.num_skipped == 3


def test_parquet_columns_that_json_cannot_hold_are_left_out(tmp_path):
    row = {
        "messages": [{"role": "user", "content": "hi", "name": None}],
        "missing": None,
        "score": 0.5,
        "image": {"bytes": b"\x89PNG", "path": "x.png"},
        "day": date(2026, 11, 23),
        "price": Decimal("1.5"),
    }
    path = write(tmp_path / "rows.parquet", [row, row | {"missing": "here"}])
    first, second = read(path)
    assert first == {"messages": [{"role": "user", "content": "hi"}], "score": 0.5}
    assert second == first | {"missing": "here"}


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_nan_is_a_missing_value_as_null_is(tmp_path, kind):
    values = [{"v": 1.0, "x": [1.0, 2.0]}, {"v": math.nan, "x": [math.nan, 1.0]}, {"v": None}]
    schema = pa.schema({"v": kind, "x": pa.list_(kind)})
    pq.write_table(pa.Table.from_pylist(values, schema), tmp_path / "rows.PARQUET")
    first, second, third = read(tmp_path / "rows.PARQUET")
    assert first == {"v": 1.0, "x": [1.0, 2.0]}
    assert second == {"x": [None, 1.0]}
    assert third == {}


def test_a_number_of_16_or_32_bits_keeps_the_digits_of_its_own_precision(tmp_path):
    wide = [0.1, 3.14, 1e-05, 16777216.0, 123456792.0, 1.1754944e-38, 0.33333334]
    half = [0.1, 3.14, 6e-08, 65504.0, 2049.0, -0.5, 0.3333]
    kinds = {
        "wide": pa.float32(),
        "half": pa.float16(),
        "exact": pa.float64(),
        "list": pa.list_(pa.float32()),
        "object": pa.struct({"x": pa.float32()}),
    }
    columns: dict[str, list[Any]] = {"wide": wide, "half": half, "exact": [0.1 + 0.2] * 7}
    columns |= {"list": [[0.1]] * 7, "object": [{"x": 0.1}] * 7}
    arrays = {name: pa.array(columns[name], kind) for name, kind in kinds.items()}
    arrays["category"] = pa.array([0.1] * 7, pa.float32()).dictionary_encode()
    pq.write_table(pa.table(arrays), tmp_path / "rows.parquet")
    rows = read(tmp_path / "rows.parquet")
    assert [row["wide"] for row in rows] == wide
    assert [row["half"] for row in rows] == [0.1, 3.14, 6e-08, 65504.0, 2048.0, -0.5, 0.3333]
    others = {name: rows[0][name] for name in ("exact", "list", "object", "category")}
    assert others == {"exact": 0.1 + 0.2, "list": [0.1], "object": {"x": 0.1}, "category": 0.1}


def test_two_fields_of_one_name_in_an_object_are_refused(tmp_path):
    parts = [pa.array([1]), pa.array([2])]
    column = pa.StructArray.from_arrays(parts, names=["x", "x"])
    pq.write_table(pa.table({"object": column}), tmp_path / "rows.parquet")
    assert "must be readable to its end, got: Converting" in refusal(tmp_path / "rows.parquet")


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["answer", "answer"])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pa.ipc.new_stream(str(tmp_path / "rows.arrow"), table.schema) as stream:
        stream.write_table(table)
    for name in ("rows.parquet", "rows.arrow"):
        message = "dataset: FILE: must have distinct column names, got answer,answer"
        assert refusal(tmp_path / name) == message


def test_an_infinite_number_is_refused_by_row_and_column(tmp_path):
    pq.write_table(pa.table({"v": [1.0, -math.inf]}), tmp_path / "rows.parquet")
    message = "dataset: FILE, row 2: v: must be a finite number, got -inf"
    assert refusal(tmp_path / "rows.parquet") == message


def test_parquet_columns_that_are_left_out_are_named_with_their_types(tmp_path):
    row = {"text": "a", "day": date(2026, 11, 23), "price": Decimal("1.5")}
    path = write(tmp_path / "rows.parquet", [row])
    assert left_out.of_records("dataset", str(path)) == (
        "columns without text or numbers: day (date32[day]), price (decimal128(2, 1))"
    )


def test_a_file_that_is_not_parquet_is_refused_in_one_line(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 is how it begins")
    assert refusal(path).startswith("dataset: FILE: must be a Parquet file, got: ")


def test_a_data_set_without_rows_is_refused(tmp_path):
    for name in ("a.jsonl", "a.csv"):
        (tmp_path / name).write_bytes(b"question\n" if name == "a.csv" else b"\n")
        assert refusal(tmp_path / name) == f"dataset: must be {TAKES}, got FILE: no rows in it"
