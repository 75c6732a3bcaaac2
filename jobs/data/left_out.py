"""Reports which files, columns and keys of a data set are not read (`begin`, `data show`)."""

from __future__ import annotations

from pathlib import Path

from ..files.documents import text_files
from . import texts
from .formats import left_out_columns
from .reader import Reading
from .sources import found_in

_NAMED = 10  # columns


def of_job(
    option: str,
    *sources: str | None,
    reading: Reading | None = None,
    is_text: bool = False,
) -> str | None:
    """Return which files, columns and keys of a job's data sets are not read; None: all are read.

    `reading`: counts the keys that the kind ignores. `is_text`: they may have documents. Raises
    SpecError.
    """
    of_source = of_texts if is_text else of_records
    found = dict.fromkeys(of_source(option, source) for source in sources if source)
    if reading is not None and reading.ignored:
        names = sorted(reading.ignored)
        shown = ", ".join(f"{name} ({reading.ignored[name]:,})" for name in names[:_NAMED])
        more = ", …" if len(names) > _NAMED else ""
        found[f"columns (records): {shown}{more}"] = None
    return "; ".join(filter(None, found)) or None


def of_records(option: str, source: str) -> str | None:
    """Return the files and columns of a data set that are not read. Raises SpecError."""
    found = found_in(option, source)
    names = (name for path in found.files for name in left_out_columns(option, path))
    columns = ", ".join(dict.fromkeys(names))
    parts = (
        None if found.note is None else f"files: {found.note}",
        f"columns without text or numbers: {columns}" if columns else None,
    )
    return "; ".join(filter(None, parts)) or None


def of_texts(option: str, source: str) -> str | None:
    """Return the same of a data set of texts, which may be documents. Raises SpecError."""
    if texts.holds_records(option, source):
        return of_records(option, source)
    note = text_files(Path(source)).note if Path(source).is_dir() else None
    return None if note is None else f"files: {note}"
