"""The content of a data set, and its use by each job kind, in one pass over its records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..errors import JobFailed, SpecError
from ..files import jsonl
from .columns import Columns
from .formats import Record
from .left_out import of_job
from .lengths import Lengths, divergence_warning
from .options import Content, RecordsSpec
from .reader import Reading
from .sources import TAKES, files_of, records, splits_note

NUM_EXAMPLES = 5

# Takes a prompt and, for each completion, prompt and completion. Returns the end of the prompt from
# the first token that differs in these; None: no token does.
Divergence = Callable[[Content, Sequence[Content]], str | None]


class _Read(dict[str, Any]):
    """A record that tracks which of its fields were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.fields: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        self.fields[name] = None
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name in self:
            self.fields[name] = None
        return super().get(name, default)


@dataclass
class Usage:
    """The use of a data set by a job kind with its default options."""

    spec: RecordsSpec
    lengths: Lengths
    fields: dict[str, None] = field(default_factory=dict)  # that it reads
    num_bad: int = 0
    first_fault: str | None = None

    def add(
        self,
        values: Mapping[str, Any],
        place: jsonl.Place,
        count: Callable[[Content], int],
        divergence: Divergence | None,
    ) -> None:
        """Count a record."""
        seen = _Read(values)
        try:
            length = count(self.spec.content_of(seen, place))
        except SpecError as error:
            self.add_bad(error)
        except JobFailed as error:  # of its chat or tokens; it does not name the row
            self.add_bad(JobFailed(f"{place.option}: {place.text}: {error}"))
        else:
            self.lengths.add(length)
            self.fields |= seen.fields
            if divergence is not None and (parts := self.spec.prompt_of(seen, place)) is not None:
                end = divergence(*parts)
                if end is not None:
                    self.lengths.add_divergence(place.text, end)

    def add_bad(self, error: Exception) -> None:
        """Count a record that cannot be used."""
        self.num_bad += 1
        self.first_fault = self.first_fault or str(error)

    def facts(self) -> dict[str, Any]:
        """Return the numbers as plain values."""
        lengths = self.lengths.facts()
        names = ("mean", "longest", "truncated", "max_length", "histogram")
        return {
            "usable": self.lengths.rows,
            "bad": self.num_bad,
            "first_fault": self.first_fault,
            "fields": list(self.fields),
            **{name: lengths[name] for name in names},
            "warning": divergence_warning(lengths),
        }


def survey(
    source: str,
    columns: Columns,
    specs: Mapping[str, RecordsSpec],
    *,
    count: Callable[[Content], int],
    unit: str,
    positions: int | None,
    divergence: Divergence | None = None,
) -> dict[str, Any]:
    """Return the rows, columns, lengths and first examples of a data set as plain values.

    `specs`: the kinds by name, with their options. `count` returns the length of a text or chat in
    `unit`, tokens or characters; only tokens are cut, and only with them is there a `divergence`.
    Raises SpecError.
    """
    files = files_of("dataset", source, TAKES)
    usages = {
        kind: Usage(spec, Lengths(spec.cut_at(positions) if unit == "tokens" else None))
        for kind, spec in specs.items()
    }
    seen: dict[str, dict[str, int]] = {}  # column -> JSON type -> rows
    num_rows, reading = 0, Reading()
    found = records("dataset", source, TAKES, reading.add_blank)
    for record in found:
        num_rows += 1
        _add(record, columns, usages, seen, count, divergence)
    return {
        "dataset": source,
        "files": len(files),
        "left_out": of_job("dataset", source, readings=[reading]),
        "splits": splits_note("dataset", source),
        "bytes": sum(path.stat().st_size for path in files),
        "rows": num_rows,
        "columns": seen,
        "unit": unit,
        "kinds": {kind: usage.facts() for kind, usage in usages.items()},
        "examples": _examples(source),
    }


def _add(
    record: Record,
    columns: Columns,
    usages: Mapping[str, Usage],
    seen: dict[str, dict[str, int]],
    count: Callable[[Content], int],
    divergence: Divergence | None,
) -> None:
    try:
        values = record.parse()
        for name, value in values.items():
            kinds = seen.setdefault(name, {})
            kind = jsonl.kind_of(value)
            kinds[kind] = kinds.get(kind, 0) + 1
        renamed, place = columns.rename(values, record.place)
    except SpecError as error:
        for usage in usages.values():
            usage.add_bad(error)
        return
    for usage in usages.values():
        usage.add(renamed, place, count, divergence)


def _examples(source: str) -> list[dict[str, Any]]:
    found = []
    for record in islice(records("dataset", source), NUM_EXAMPLES):
        try:
            found.append(record.parse())
        except SpecError as error:
            found.append({"error": str(error)})
    return found
