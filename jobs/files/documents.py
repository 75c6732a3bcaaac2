"""Reads documents: paragraphs of a text file, text files of a folder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import SpecError
from .folders import Found, files_in

TEXTS = (".txt", ".md", ".py")  # the files of a folder that are documents


def documents(
    field: str, data: Path, find: Callable[[Path, Collection[str]], Found] = files_in
) -> Iterator[str]:
    """Read documents one by one: paragraphs of a text file, files of a folder.

    `find` lists the files of a folder. Raises SpecError naming `field`, the option that named
    `data`, and the invalid file.
    """
    if data.is_dir():
        files = text_files(data, find).files
        yield from filter(str.strip, (read_text(field, path) for path in files))
    else:
        yield from _paragraphs(field, data)


def check_regular(field: str, path: Path) -> None:
    """Raise SpecError for a pipe or a device: reading one may never end, and it is read twice."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise SpecError(field, f"must be a regular file, got {str(path)!r}")


def read_text(field: str, path: Path) -> str:
    """Return the text of a file. Raises SpecError naming `field` and the file."""
    with _named_problems(field, path):
        return path.read_text(encoding="utf-8")


def text_files(folder: Path, find: Callable[[Path, Collection[str]], Found] = files_in) -> Found:
    """Return the documents of a folder and its subfolders, in a reproducible order."""
    return find(folder, TEXTS)


def _paragraphs(field: str, path: Path) -> Iterator[str]:
    """Yield the paragraphs: text between empty lines."""
    lines: list[str] = []
    with _named_problems(field, path), path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                lines.append(line)
            elif lines:
                yield "".join(lines)
                lines = []
    if lines:
        yield "".join(lines)


@contextmanager
def _named_problems(field: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SpecError(
            field, f"must be a readable file, got {str(path)!r}: {error.strerror}"
        ) from None
    except UnicodeDecodeError as error:
        raise SpecError(field, f"must be UTF-8 text, got {str(path)!r}: {error}") from None
