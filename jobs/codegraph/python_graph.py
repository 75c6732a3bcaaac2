"""Python sources to triples and code blocks: finds the files of a folder and reads each of them."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.util import decode_source
from pathlib import Path

from ..errors import SpecError
from ..files.folders import Found, files_in
from .syntax_reader import Module, Reader

NOT_SOURCES = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__"})


def sources_in(option: str, folder: Path) -> Found:
    """Return the Python files below a folder in a fixed order, without tests and hidden folders.

    Raises SpecError for a folder that cannot be read; `option` names it.
    """
    try:
        return files_in(folder, (".py",), hiding=(".",), skipped=NOT_SOURCES)
    except OSError as error:
        raise SpecError(
            option, f"must be a folder that can be read, got {error.filename}: {error.strerror}"
        ) from None


def read_modules(
    sources: Iterable[Path], root: Path, *, on_skip: Callable[[Path, str], None] | None = None
) -> Iterator[Module]:
    """Yield the module of each file below `root`, in the given order.

    A file that cannot be read or parsed is skipped; `on_skip` gets its path and the reason.
    """
    for path in sources:
        try:
            module = _read(path, root)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            # ValueError: wrong encoding, zero bytes. MemoryError: the parser raises it if nesting
            # is too deep.
            if on_skip is not None:
                on_skip(path, f"{type(error).__name__}: {error}")
        else:
            yield module


def _read(path: Path, root: Path) -> Module:
    relative = path.relative_to(root)
    relative.as_posix().encode()  # raises ValueError: such a name could not be written to JSON
    source = decode_source(path.read_bytes())
    parts = list(relative.with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    if is_package:
        parts.pop()
    name = ".".join(parts or [root.resolve().name])
    reader = Reader(name, relative.as_posix(), is_package, source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # e.g. invalid escapes in the user's code
        return reader.read(ast.parse(source))
