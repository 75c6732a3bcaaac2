"""Reads files of a model folder, an untrusted input: regular files of a bounded size only.

Opening a named pipe waits for its other end, and a device can be read without end. Imports no
torch.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import orjson

SUFFIXES = {".bin", ".jinja", ".json", ".model", ".safetensors", ".tiktoken", ".txt"}
TEMPLATES = "additional_chat_templates"  # a folder in that of the model
# Files of a training in the same folder, which are not read with a model.
NOT_READ = {"optimizer.bin", "scheduler.bin", "trainer_state.json", "training_args.bin"}

MOST_SETTINGS = 32 << 20  # bytes of a JSON file with settings
MOST_JSON = 1 << 30  # bytes of a vocabulary or an index in JSON; the largest known has 35 MB
_UNSAFE = re.compile("trust_remote_code|weights_only")  # options that libraries advise to set
_MOST_REASON = 300  # characters
_SHOWN = 60  # characters of a value
_LFS = b"version https://git-lfs"
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class BadFile(ValueError):
    """A file of a model folder is not what it must be: `FILE: field must be X, got Y`."""

    def __init__(self, name: str, field: str, takes: str, got: str) -> None:
        super().__init__(f"{name}: {field + ' ' if field else ''}must be {takes}, got {got}")


def shown(value: Any) -> str:
    """Return a value for a message, cut to a few characters."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} ({len(value)} entries)"
    text = "null" if value is None else ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file, or a link that ends at one. Raises BadFile, and OSError."""
    # O_NONBLOCK: opening a pipe without a writer returns at once.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _check_mode(path.name, os.fstat(descriptor).st_mode)
    except BadFile:
        os.close(descriptor)
        raise
    with open(descriptor, "rb") as file:
        yield file


def check_regular(path: Path) -> None:
    """Raise BadFile if a path is no regular file nor a link that ends at one."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        got = f"a link that cannot be followed: {error.strerror}" if path.is_symlink() else error
        raise BadFile(path.name, "", "a regular file", str(got)) from error
    _check_mode(path.name, mode)


def _check_mode(name: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        got = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise BadFile(name, "", "a regular file", got)


def check_not_pointer(name: str, begin: bytes) -> None:
    """Raise BadFile if a file, by its first bytes, is the text that Git LFS keeps in its place."""
    if begin and begin.startswith(_LFS[: len(begin)]):
        raise BadFile(name, "", "the file itself", "a pointer of Git LFS: run `git lfs pull`")


@contextmanager
def naming(takes: str) -> Iterator[None]:
    """Turn what a library raises for a file into a ValueError. `takes`: FILE: must be X."""
    try:
        yield
    except Exception as error:  # libraries raise any type for damaged files
        reason = " ".join(str(error).split())
        if _UNSAFE.search(reason):
            raise ValueError(f"{takes}, got one with code of its own, which is not run") from error
        if not isinstance(error, OSError | ValueError):
            reason = f"{type(error).__name__}: {reason}"
        raise ValueError(f"{takes}, got one that it refuses: {reason[:_MOST_REASON]}") from error


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises BadFile, OSError."""
    with opened(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise BadFile(path.name, "", f"a file of at most {most:,} bytes", "a larger one")
    return content


def _loosely_parsed(content: bytes) -> Any:
    """Parse JSON with NaN or Infinity, as in settings of Mamba models; None if it is not that."""
    if b"NaN" not in content and b"Infinity" not in content:
        return None
    with suppress(ValueError, RecursionError):
        return json.loads(content)
    return None


def read_json(path: Path, most: int = MOST_SETTINGS) -> dict[str, Any]:
    """Return the JSON object in a file. Raises BadFile, OSError."""
    content = read_bytes(path, most)
    try:
        found = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        check_not_pointer(path.name, content[: len(_LFS)])
        found = _loosely_parsed(content)
        if found is None:
            raise BadFile(path.name, "", "JSON", f"text that is not: {error}") from error
    if not isinstance(found, dict):
        raise BadFile(path.name, "", "a JSON object", shown(found))
    return found
