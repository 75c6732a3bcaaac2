"""Reports what of a data set is not read: files, columns, keys, blank lines, unusable records.

All kinds have it in the event `begin`, as `left_out`; `data show` has it, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..files.documents import text_files
from ..files.folders import Found
from . import texts
from .formats import left_out_columns
from .reader import Reading
from .sources import found_in

_NAMED = 10  # columns


def of_job(
    option: str,
    *sources: str | None,
    readings: Iterable[Reading] = (),
    is_text: bool = False,
) -> str | None:
    """Return what of a job's data sets is not read; None: all is read.

    `readings`: how they were read. `is_text`: they may have documents. Raises SpecError.
    """
    of_source = of_texts if is_text else of_records
    readings = list(readings)
    if any(reading.former is not None for reading in readings):
        sources = ()  # other files are left out: `report_former` names them
    return joined(
        *(of_source(option, source) for source in sources if source), *map(of_reading, readings)
    )


def joined(*notes: str | None) -> str | None:
    """Return several of these notes as one."""
    return "; ".join(filter(None, dict.fromkeys(notes))) or None


def of_reading(reading: Reading) -> str | None:
    """Return the blank lines, the unusable records and the keys that were left out."""
    names = sorted(reading.ignored)
    shown = ", ".join(f"{name} ({reading.ignored[name]:,})" for name in names[:_NAMED])
    more = ", …" if len(names) > _NAMED else ""
    return joined(
        f"blank lines: {reading.num_blank:,}" if reading.num_blank else None,
        f"unusable records: {reading.num_skipped:,}" if reading.num_skipped else None,
        f"columns (records): {shown}{more}" if names else None,
    )


def of_files(found: Found) -> str | None:
    """Return the files of a folder that are not read."""
    return None if found.note is None else f"files: {found.note}"


def of_records(option: str, source: str) -> str | None:
    """Return the files and columns of a data set that are not read. Raises SpecError."""
    found = found_in(option, source)
    names = (name for path in found.files for name in left_out_columns(option, path))
    columns = ", ".join(dict.fromkeys(names))
    return joined(
        of_files(found),
        f"columns without text or numbers: {columns}" if columns else None,
    )


def of_texts(option: str, source: str) -> str | None:
    """Return the same of a data set of texts, which may be documents. Raises SpecError."""
    if texts.holds_records(option, source):
        return of_records(option, source)
    return of_files(text_files(Path(source))) if Path(source).is_dir() else None
