"""Records: what dataclasses accept from JSON, including the behavior of msgspec that this needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest

from warmd.jobs.files import records


@dataclass(frozen=True)
class Part:
    name: str
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class Record:
    number: int = 0
    share: float = 0.0
    either: int | float = 0
    is_on: bool = False
    text: str | None = None
    at: datetime | None = None
    tags: tuple[str, ...] = ()
    parts: list[Part] = field(default_factory=list)
    by_name: Mapping[str, Part] = field(default_factory=dict)
    anything: Any = None
    document: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("number: must be at least 0")


@dataclass(frozen=True, kw_only=True)
class Longer(Record):
    more: int


def test_unknown_fields_are_ignored_and_missing_ones_have_their_defaults():
    assert records.decode(b'{"number": 3, "of_a_later_version": {"a": [1]}}', Record) == Record(
        number=3
    )
    found = records.decode(b'{"parts": [{"name": "a", "new": 1}]}', Record)
    assert found.parts == [Part("a")]
    assert found.document is not records.decode(b"{}", Record).document


def test_a_record_comes_back_from_its_json():
    record = Longer(
        number=2**63,
        share=0.1,
        either=7,
        is_on=True,
        text="ä\n",
        at=datetime(2026, 11, 27, 21, 5, 56, 120, UTC),
        tags=("a", "b"),
        parts=[Part("a", 1)],
        by_name={"b": Part("b")},
        anything=[1, 1.0, None, {"a": "b"}],
        document={"number": "not the field"},
        more=1,
    )
    found = records.decode(orjson.dumps(record), Longer)
    assert found == record
    assert [type(x) for x in (found.either, *found.anything[:2])] == [int, int, float]


@pytest.mark.parametrize(
    "content",
    [
        '{"number": true}', '{"number": 1.0}', '{"number": "1"}', '{"number": null}',
        '{"number": 18446744073709551616}', '{"share": "1"}', '{"share": true}', '{"is_on": 1}',
        '{"text": 1}', '{"at": 1}', '{"at": "yesterday"}', '{"tags": "a"}', '{"tags": [1]}',
        '{"parts": {}}', '{"parts": [{}]}', '{"parts": [{"name": 1}]}', '{"by_name": [["a"]]}',
        '{"by_name": {"a": null}}', '{"document": []}', '{"number": -1}',
        "[]", "null", "1", '"a"',
    ],
)  # fmt: skip
def test_a_value_of_another_type_makes_the_record_unreadable(content):
    with pytest.raises(ValueError, match=r"Expected|Invalid|required|must be at least 0"):
        records.decode(content, Record)


def test_a_missing_field_without_a_default_makes_the_record_unreadable():
    with pytest.raises(ValueError, match="missing required field `more`"):
        records.decode(b"{}", Longer)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"{}{}", b"{}\0", b"\xef\xbb\xbf{}", b'{"number": 01}', b"{'number': 1}",
        b'{"share": NaN}', b'{"share": Infinity}', b'{"share": 1e999}', b'{"x": NaN}',
        b'{"text": "\xff"}', b'{"text": "\\ud800"}', b'{"x": "\xff"}', b'{"x": "\\ud800"}',
        b'{"\xff": 1}', b'{"anything": ' + b"[" * 100_000, b'{"x": ' + b"[" * 100_000,
        b'{"x": ' + b"[" * 2000 + b"]" * 2000 + b"}", '{"text": "\ud800"}',
    ],
)  # fmt: skip
def test_what_is_not_json_is_unreadable_also_in_fields_that_are_skipped(content):
    with pytest.raises(ValueError):  # noqa: PT011 - orjson's own
        records.decode(content, Record)


def test_an_integer_may_stand_for_a_float():
    found = records.decode(b'{"share": 3}', Record)
    assert (found.share, type(found.share)) == (3.0, float)


def test_of_a_field_that_stands_twice_the_last_one_counts():
    assert records.decode(b'{"number": 1, "number": 2}', Record).number == 2


def test_untyped_parts_are_as_orjson_reads_them():
    nested = b"[" * 1000 + b"]" * 1000  # deeper than Python functions may call each other here
    content = b'{"anything": {"deep": %b, "huge": 18446744073709551616}}' % nested
    found = records.decode(content, Record).anything
    assert isinstance(found["huge"], float)  # orjson cannot write an integer beyond 64 bits
    depth, inner = 1, found["deep"]
    while inner:
        depth, (inner,) = depth + 1, inner
    assert depth == 1000


def test_a_class_and_the_one_that_it_is_derived_from_are_told_apart():
    for record in (Record, Longer, Record):
        found = records.decode(b'{"number": 1, "more": 2}', record)
        assert type(found) is record


def test_large_records_are_read():
    parts = [Part(f"part-{i}", i) for i in range(20_000)]
    assert records.decode(orjson.dumps(Record(parts=parts)), Record).parts == parts


def test_a_file_that_is_missing_or_no_record_is_none(tmp_path):
    path = tmp_path / "record.json"
    assert records.read(path, Record) is None
    path.write_bytes(b'{"number": "x"}')
    assert records.read(path, Record) is None
    path.write_bytes(b'{"number": 1}')
    assert records.read(path, Record) == Record(number=1)
    assert records.read(tmp_path, Record) is None
