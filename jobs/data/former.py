"""Reads data sets by the rules of earlier versions, for jobs that were submitted to those versions.

A resumed job needs the records, the order and the held-out records that its checkpoint was trained
with; today's rules could give others. What a new job would read differently is counted and named.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..files.folders import Found, files_in
from ..files.jsonl import Place

_NAMED = 5  # files


@dataclass
class Former:
    """The rules of version 0 (see context.RULES), and counts of what a new job reads differently.

    Hidden files and index files were read, suffixes counted in lower case only; NaN and numbers
    that float64 cannot hold were read as orjson and pyarrow give them; of two columns of one name
    in a Parquet file the last one was read.
    """

    more: dict[str, None] = field(default_factory=dict)  # files that are left out today
    fewer: dict[str, None] = field(default_factory=dict)  # files that are read today
    repeated: dict[str, None] = field(default_factory=dict)  # files with two columns of one name
    num_different: int = 0  # records with values that are read differently today
    first: str = ""  # the place of the first such record

    @classmethod
    def of(cls, rules: int) -> Former | None:
        """Return the rules of a job that was submitted with these RULES; None: those of today."""
        return cls() if rules < 1 else None

    def files_in(self, folder: Path, suffixes: Collection[str]) -> Found:
        """Return the files below a folder that were read."""
        found = sorted(p for p in folder.rglob("*") if p.suffix in suffixes and p.is_file())
        today = files_in(folder, suffixes).files
        for names, some, others in ((self.more, found, {*today}), (self.fewer, today, {*found})):
            names |= {str(path.relative_to(folder)): None for path in some if path not in others}
        return Found(found)

    def parsed(
        self, then: Callable[[], dict[str, Any]], now: Callable[[], dict[str, Any]], place: Place
    ) -> dict[str, Any]:
        """Return a record as it was read then."""
        values = then()
        try:
            is_same = _typed(now()) == _typed(values)
        except SpecError:
            is_same = False
        if not is_same:
            self.num_different += 1
            self.first = self.first or place.text
        return values

    def add_repeated(self, path: Path) -> None:
        """Count a file with two columns of one name."""
        self.repeated[path.name] = None

    @property
    def note(self) -> str | None:
        """What a new job would read differently, in a sentence; None: nothing."""
        parts = (
            f"files that are left out today: {_some(self.more)}" if self.more else None,
            f"without files that are read today: {_some(self.fewer)}" if self.fewer else None,
            f"the last one of two columns of one name, refused today: {_some(self.repeated)}"
            if self.repeated
            else None,
            f"{self.num_different:,} records with numbers or NaN that are read differently today, "
            f"the first: {self.first}"
            if self.num_different
            else None,
        )
        return "; ".join(filter(None, parts)) or None


def finder(former: Former | None) -> Callable[[Path, Collection[str]], Found]:
    """Return the function that lists the files of a folder; `former`: see Reading."""
    return files_in if former is None else former.files_in


def _typed(value: Any) -> Any:
    """Return a value with the types in it: the text 1e400 is not the number."""
    if isinstance(value, dict):
        return {name: _typed(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    return type(value), value


def _some(names: Collection[str]) -> str:
    shown = ", ".join([*names][:_NAMED])
    return f"{len(names):,} ({shown}{', …' if len(names) > _NAMED else ''})"
