"""Texts to train an encoder on: the `text` of records, or documents of text files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..files import jsonl
from ..files.documents import documents, text_files
from ..files.folders import has_suffix
from ..files.jsonl import Place
from . import keys
from .former import Former, finder
from .hub import SUFFIXES, Name, is_hub_folder
from .reader import Reader, Reading
from .sources import found_in

TAKES = "a text, JSONL, CSV or Parquet file, a folder of them or a hub data set"


def read(option: str, source: str, reading: Reading) -> Iterator[str]:
    """Yield texts that are not blank. Raises SpecError for a file or record that has none."""
    former = reading.former
    if holds_records(option, source, former):
        return filter(
            str.strip, Reader(text_of, reading, keys.READ["texts"]).rows(option, source, TAKES)
        )
    return documents(option, Path(source), finder(former))


def files(option: str, source: str, former: Former | None = None) -> tuple[Path, list[Path]]:
    """Return the folder or file of a source, and its files in order."""
    path = Path(source)
    if holds_records(option, source, former):
        root = path if path.exists() else Path(Name.parse(source).name)
        return root, found_in(option, source, TAKES, former).files
    return path, text_files(path, finder(former)).files if path.is_dir() else [path]


def holds_records(option: str, source: str, former: Former | None = None) -> bool:
    """Whether a source has records; a folder with text files besides a README has documents.

    Raises SpecError for a folder that cannot be read.
    """
    path = Path(source)
    if not path.is_dir():
        return has_suffix(path, SUFFIXES) or Path(Name.parse(source).name).is_dir()
    if is_hub_folder(option, path):
        return True
    return all(file.stem == "README" for file in text_files(path, finder(former)).files)


def text_of(values: Mapping[str, Any], place: Place) -> str:
    """Return the text of a record, which may be blank. Raises SpecError."""
    if "text" not in values:
        raise place.fault("an object with text", jsonl.keys_of(dict(values)))
    text = values["text"]
    if not jsonl.is_text(text):
        raise place.field("text").fault("text", jsonl.kind_of(text))
    return str(text)
