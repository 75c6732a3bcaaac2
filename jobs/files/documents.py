"""Reads documents: paragraphs of a text file, text files of a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import SpecError

TEXTS = (".txt", ".md", ".py")  # the files of a folder that are documents


def documents(data: Path) -> Iterator[str]:
    """Read documents one by one: paragraphs of a text file, files of a folder.

    Raises SpecError naming the invalid file.
    """
    if data.is_dir():
        yield from filter(str.strip, map(_read_text, text_files(data)))
    else:
        yield from _paragraphs(data)


def check_regular(field: str, path: Path) -> None:
    """Raise SpecError for a pipe or a device: reading one may never end, and it is read twice."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise SpecError(field, f"must be a regular file, got {str(path)!r}")


def text_files(folder: Path) -> list[Path]:
    """Return the documents of a folder and its subfolders, in a reproducible order."""
    return sorted(path for path in folder.rglob("*") if path.suffix in TEXTS and path.is_file())


def _paragraphs(path: Path) -> Iterator[str]:
    """Yield the paragraphs: text between empty lines."""
    lines: list[str] = []
    with _named_problems(path), path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                lines.append(line)
            elif lines:
                yield "".join(lines)
                lines = []
    if lines:
        yield "".join(lines)


def _read_text(path: Path) -> str:
    with _named_problems(path):
        return path.read_text(encoding="utf-8")


@contextmanager
def _named_problems(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("data", f"must be UTF-8 text, got {str(path)!r}: {error}") from None
