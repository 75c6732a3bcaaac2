"""The passages of an encode job: texts, or code blocks of Python sources. Imports no torch.

A passage is one record of the output. For a text model every file of a folder is a passage; for the
code-graph encoder every module, class and function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..codegraph.python_graph import read_modules, sources_in
from ..codegraph.sequences import Example, build_examples
from ..codegraph.syntax_reader import Block, Module
from ..data import keys, left_out
from ..data.hub import SUFFIXES
from ..data.reader import Reader, Reading
from ..data.texts import TAKES, text_of
from ..errors import SpecError
from ..files import jsonl
from ..files.documents import check_regular, documents, read_text, text_files
from ..files.folders import has_suffix
from ..files.jsonl import Place

PYTHON = ".py"


@dataclass(frozen=True)
class Passage:
    """One thing to encode."""

    id: str  # a row's own or its number, an entity's dotted name, a file's path
    text: str
    file: str | None = None  # where a code block stands, relative to the input
    example: Example | None = None  # the code with its walk through the graph, if requested
    ids: tuple[int, ...] | None = None  # token ids, given instead of a text


def from_texts(texts: Iterable[str]) -> list[Passage]:
    """Return the texts, numbered from 0."""
    return [Passage(str(number), text) for number, text in enumerate(texts)]


def from_ids(texts: Iterable[Iterable[int]]) -> list[Passage]:
    """Return a passage for each list of token ids, numbered from 0."""
    return [Passage(str(number), "", ids=tuple(ids)) for number, ids in enumerate(texts)]


def from_files(path: Path, reading: Reading | None = None) -> list[Passage]:
    """Read records, paragraphs of a text file, a Python file, or the files of a folder.

    `reading`: the record reader's options, and its counters of what it leaves out. Raises SpecError
    that names the invalid record or file.
    """
    if path.is_dir():
        return [
            Passage(str(file.relative_to(path)), read_text("input", file))
            for file in text_files(path).files
        ]
    if has_suffix(path, SUFFIXES):
        reader = Reader(_passage, reading or Reading(), keys.READ["encode"])
        return list(reader.rows("input", str(path), TAKES))
    if path.suffix == PYTHON:
        return [Passage(path.name, read_text("input", path))]
    return from_texts(documents("input", path))


def from_sources(
    path: Path,
    *,
    chains: tuple[Any, int] | None,
    on_skip: Callable[[Path, str], None],
    check_stop: Callable[[], None],
) -> list[Passage]:
    """Read the modules, classes and functions of a Python file or of a folder of them.

    `chains`: a tokenizer of `train_tokenizer` and a length, to walk the graph of all files from
    every block that has one; None: code alone. `check_stop` is called periodically.
    """
    root = path if path.is_dir() else path.parent
    files = sources_in("input", path).files if path.is_dir() else [path]
    modules = []
    for module in read_modules(files, root, on_skip=on_skip):
        check_stop()
        modules.append(module)
    return list(_blocks(modules, chains, check_stop))


def is_sources(path: Path) -> bool:
    """Whether the path is of Python sources, which the code-graph encoder splits into blocks."""
    return path.suffix == PYTHON or path.is_dir()


def left_out_of(path: Path, reading: Reading, *, of_code: bool) -> str | None:
    """Return which parts of an input were not read, once it has been read; None: all were."""
    if path.is_dir():
        return left_out.of_files(sources_in("input", path) if of_code else text_files(path))
    files = left_out.of_records("input", str(path)) if has_suffix(path, SUFFIXES) else None
    return left_out.joined(files, left_out.of_reading(reading))


def check(path: Path, *, of_code: bool) -> None:
    """Check that there is something to encode; Python files are not read. Raises SpecError."""
    if not path.exists():
        raise SpecError("input", f"must be a file or a folder, got {str(path)!r}")
    check_regular("input", path)
    if of_code and is_sources(path):
        found: Sequence[object] = sources_in("input", path).files if path.is_dir() else [path]
    else:
        found = from_files(path)
    if not found:
        raise SpecError("input", f"must hold something to encode, got {str(path)!r}")


def identity(passages: Iterable[Passage]) -> bytes:
    """Return a hash of the passages, in their order."""
    digest = hashlib.sha256()
    for passage in passages:
        for part in (passage.id, passage.file or "", passage.text):
            encoded = part.encode(errors="surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        if passage.ids is not None:
            digest.update(repr(passage.ids).encode())
        if passage.example is not None:
            for column in passage.example:
                digest.update(column.tobytes())
    return digest.digest()


def _blocks(
    modules: list[Module], chains: tuple[Any, int] | None, check_stop: Callable[[], None]
) -> Iterator[Passage]:
    blocks = [block for module in modules for block in module.blocks]
    made: Iterator[tuple[Block, Example]] = iter(())
    if chains is not None:
        tokenizer, seq_len = chains
        triples = (triple for module in modules for triple in module.triples)
        made = build_examples(triples, blocks, tokenizer, seq_len=seq_len)
    # `made` lacks blocks that are not the head of a triple, and keeps the order.
    ahead = next(made, None)
    for block in blocks:
        check_stop()
        example = None
        if ahead is not None and ahead[0] is block:
            example = ahead[1]
            ahead = next(made, None)
        yield Passage(block.name, block.text, block.file, example)


def _passage(values: Mapping[str, Any], place: Place) -> Passage:
    name = values.get("id", place.line - 1)
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise place.field("id").fault("text or an integer", jsonl.kind_of(name))
    return Passage(str(name), text_of(values, place))
