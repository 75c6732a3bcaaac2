"""Finds the files of a data set from the value of an option such as `dataset`."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ..errors import SpecError
from ..files import jsonl
from ..files.folders import Found
from ..spec import path_of
from .formats import Record, records_of
from .former import Former, finder
from .hub import SUFFIXES, Name, is_hub_folder, local_copy, split_files

TAKES = "a JSONL, CSV or Parquet file, a folder of them or a hub data set"


def located(option: str, source: str, folder: Path, takes: str = TAKES) -> str:
    """Return a data set, as seen from `folder`, by the absolute path of its file or folder.

    A hub data set is looked up in the hub's caches, and downloaded where the hub can be reached.
    Raises SpecError.
    """
    path = path_of(option, source, folder)
    if os.path.exists(path):  # Path.exists raises for names that are too long
        return str(path)
    named = Name.parse(source)
    inside = path_of(option, named.name, folder)
    if ":" in source and os.path.isdir(inside):
        return str(replace(named, name=str(inside)))
    if named.is_id:
        copy = local_copy(option, named)
        files_of(option, found := f"{replace(named, name=str(copy))}", takes)
        return found
    return str(path)


def records(
    option: str,
    source: str,
    takes: str = TAKES,
    on_blank: Callable[[], None] = lambda: None,
    former: Former | None = None,
) -> Iterator[Record]:
    """Yield the records of a data set, file by file; call `on_blank` for each blank line.

    `takes`: the values that `option` accepts. `former`: the rules of a job that an earlier version
    began. Raises SpecError if it is not a data set, or has no records.
    """
    is_empty = True
    for path in found_in(option, source, takes, former).files:
        try:
            for record in records_of(option, path, on_blank, former):
                is_empty = False
                yield record
        except OSError as error:
            raise _refused(option, str(path), takes, error.strerror or error) from None
    if is_empty:
        raise _refused(option, source, takes, "no rows in it")


def files_of(option: str, source: str, takes: str = TAKES) -> list[Path]:
    """Return the files of a data set in the order in which they are read. Raises SpecError."""
    return found_in(option, source, takes).files


def found_in(option: str, source: str, takes: str = TAKES, former: Former | None = None) -> Found:
    """Return the files of a data set, and those of its folder left out. Raises SpecError."""
    path = Path(source)
    try:
        if (named := _named(source)) is not None:
            return Found(split_files(option, named))
        mode = os.stat(source).st_mode  # not Path.stat: Path("") is the working directory
        if stat.S_ISREG(mode):
            return Found([path])
        if not stat.S_ISDIR(mode):  # opening a named pipe would wait for a writer
            raise _refused(option, source, takes, "not a regular file")
        if is_hub_folder(option, path):
            return Found(split_files(option, Name(source)))
        found = finder(former)(path, SUFFIXES)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL or a lone surrogate
        reason = error.strerror if isinstance(error, OSError) else error
        raise _refused(option, source, takes, reason) from None
    if not found.files:
        but = "" if found.note is None else f", but {found.note}"
        raise _refused(option, source, takes, f"no {', '.join(SUFFIXES)} file in it{but}")
    return found


def splits_note(option: str, source: str) -> str | None:
    """Return which splits of a folder are read as one, in a sentence. Raises SpecError."""
    splits = found_in(option, source).splits
    if not splits:
        return None
    folder = jsonl.shown(source)
    names = ", ".join(splits)
    return (
        f"{folder} has files of {names}, which are read as one: {folder}::train reads one of them"
    )


def _named(source: str) -> Name | None:
    """Return the parts of a source of the form FOLDER:CONFIG:SPLIT, of a hub data set."""
    named = Name.parse(source)
    is_split = ":" in source and not os.path.exists(source) and os.path.isdir(named.name)
    return named if is_split else None


def _refused(option: str, source: str, takes: str, reason: object) -> SpecError:
    return SpecError(option, f"must be {takes}, got {jsonl.shown(source)}: {reason}")
