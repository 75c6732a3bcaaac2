"""Converts the records of a data set to the rows of a kind; can skip unusable records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..context import Emit
from ..errors import SpecError
from ..files.jsonl import Place
from .columns import Columns
from .former import Former
from .sources import TAKES, records, splits_note

Row = TypeVar("Row")


@dataclass
class Reading:
    """The rules for reading the records of data sets, and counts of what was left out."""

    columns: Columns = field(default_factory=Columns)
    skips_bad_rows: bool = False
    former: Former | None = None  # the rules of a job that an earlier version began
    num_blank: int = 0  # blank lines
    num_skipped: int = 0  # unusable records
    first_fault: str | None = None  # of the first record that was skipped
    ignored: dict[str, int] = field(
        default_factory=dict
    )  # number of records by key that is not read

    @property
    def skipped(self) -> str:
        """The number of records that were skipped, and why the first one was."""
        return f"{self.num_skipped} bad rows, the first: {self.first_fault}"

    def add_blank(self) -> None:
        """Count a blank line."""
        self.num_blank += 1

    def skip(self, error: SpecError) -> None:
        """Count an unusable record. Raises its error if unusable records are not skipped."""
        if not self.skips_bad_rows:
            raise error
        self.num_skipped += 1
        self.first_fault = self.first_fault or str(error)


class Reader(Generic[Row]):
    """Reads data sets by `convert`, which raises SpecError for a record that cannot be used.

    `known`: the keys that it reads, if others are ignored; None: it reads all.
    """

    def __init__(
        self,
        convert: Callable[[Mapping[str, Any], Place], Row],
        reading: Reading,
        known: frozenset[str] | None = None,
    ) -> None:
        self._convert = convert
        self._known = known
        self.reading = reading

    def rows(self, option: str, source: str, takes: str = TAKES) -> Iterator[Row]:
        """Yield the usable records of a data set."""
        reading = self.reading
        for record in records(option, source, takes, reading.add_blank, reading.former):
            try:
                values, place = reading.columns.rename(record.parse(), record.place)
                row = self._convert(values, place)
            except SpecError as error:
                reading.skip(error)
                continue
            if self._known is not None and not self._known.issuperset(values):
                for name in values.keys() - self._known:
                    reading.ignored[name] = reading.ignored.get(name, 0) + 1
            yield row


def report_former(emit: Emit, former: Former | None) -> None:
    """Emit a warning when a new job would read the same files differently."""
    if former is not None and former.note is not None:
        emit(
            "warning",
            message="data: read by the rules of the earlier version that this job was submitted "
            f"to, so that its records and their order are the same: {former.note}",
        )


def report_skipped(emit: Emit, reading: Reading) -> None:
    """Emit a warning when records were skipped."""
    if reading.num_skipped:
        emit(
            "warning",
            message=f"dataset: {reading.num_skipped} rows are skipped; the first: "
            f"{reading.first_fault}",
            rows_skipped=reading.num_skipped,
        )


def report_splits(
    emit: Emit, option: str, *sources: str | None, former: Former | None = None
) -> None:
    """Emit a warning for each folder whose files are of several splits. Raises SpecError.

    Not for a job with `former` rules: today's rules may refuse its folder.
    """
    for source in filter(None, sources if former is None else ()):
        if (note := splits_note(option, source)) is not None:
            emit("warning", message=f"{option}: {note}")


def report_shared(emit: Emit, num_shared: int, num_held_out: int) -> None:
    """Emit a warning when held-out records are also trained on."""
    if num_shared:
        emit(
            "warning",
            message=f"eval_dataset: {num_shared} of the {num_held_out} held-out records are also "
            "trained on: their evaluation does not measure what the model has not seen",
            rows_shared=num_shared,
        )


def progress(emit: Emit) -> Callable[[str, int, int | None, str], None]:
    """Return a function that emits the progress of an activity at its start and every second."""
    latest, due = "", 0.0

    def report(activity: str, done: int, total: int | None, unit: str) -> None:
        nonlocal latest, due
        now = time.monotonic()
        if activity != latest or now >= due:
            latest, due = activity, now + 1
            emit("progress", activity=activity, done=done, total=total, unit=unit)

    return report
