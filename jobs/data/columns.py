"""Column names of a data set, renamed to the fields that a job kind reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from ..errors import SpecError
from ..files import jsonl
from ..files.jsonl import Place


@dataclass(frozen=True)
class Columns:
    """Fields by the columns that they are read from; all other columns keep their names."""

    names: Mapping[str, str] = field(default_factory=dict)  # field -> column of the data set

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Self:
        """Read `FIELD=COLUMN`, several of them separated by commas. Raises SpecError."""
        names: dict[str, str] = {}
        for part in ",".join(texts).split(",") if texts else ():
            name, equals, column = (word.strip() for word in part.partition("="))
            if not (equals and name and column):
                raise SpecError("columns", f"must be FIELD=COLUMN,…, got {part[:80]!r}")
            if name in names:
                raise SpecError("columns", f"must name each field once, got {name[:80]} twice")
            names[name] = column
        return cls(names)

    def rename(self, values: Mapping[str, Any], place: Place) -> tuple[Mapping[str, Any], Place]:
        """Return a record by its new names, and its place, which keeps naming the old ones.

        Raises SpecError for a record that lacks a column.
        """
        if not self.names:
            return values, place
        for column in self.names.values():
            if column not in values:
                raise place.fault(f"an object with {column} (columns)", jsonl.keys_of(dict(values)))
        moved = {*self.names, *self.names.values()}
        kept = {name: value for name, value in values.items() if name not in moved}
        renamed = {name: values[column] for name, column in self.names.items()}
        return renamed | kept, place._replace(columns=self.names)
