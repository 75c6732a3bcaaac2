"""Reader of append-only files (AOF) of Redis and Valkey: which files there are, which are damaged.

From Redis 7 on it is a folder (multi-part AOF): a manifest names a base file (a snapshot in RDB
format, or commands) and incremental files, which have the commands written since, in order. Redis 6
has one file: commands, after a snapshot once it was rewritten. Commands are RESP arrays; `MULTI` …
`EXEC` is one transaction; lines that begin with `#` are annotations, `#TS:` with the time of the
commands after it.

Only snapshots have a checksum: a damaged byte within a value of a command cannot be found. What a
power failure has kept from the disk can: it reads as zeros, to the end of a block or of the file.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = "appendonlydir"
NAME = "appendonly.aof"  # the one file of Redis 6; prefix of the files in the folder
MANIFEST = f"{NAME}.manifest"

_PART = re.compile(rf"{re.escape(NAME)}\.(\d{{1,18}})\.(base|incr)\.(rdb|aof)")
_LINE = re.compile(r'file (?:"([^"\\/]+)"|([^\s"/]+)) seq (\d{1,18}) type ([bhi])')
_BASE, _INCREMENT = "b", "i"

_LONGEST_COUNT = 32  # bytes of the line with a number
_LONGEST_ANNOTATION = 1024
_UNWRITTEN = bytes(512)  # a sector of a disk, the smallest block; warmd writes no such values
_SNAPSHOT = re.compile(rb"(?:REDIS\d{4}|VALKEY\d{3})")
_SNAPSHOT_END = b"\xff"  # the operation before the checksum
_CHECKSUM_BYTES = 8

Arities = Mapping[bytes, int]  # number of words of each command, negative: at least as many


@dataclass(frozen=True)
class Part:
    """A base file or an incremental file; the one file of Redis 6 counts as a base file."""

    path: Path
    sequence: int
    is_base: bool

    @property
    def line(self) -> str:
        """Its line in the manifest."""
        type_ = _BASE if self.is_base else _INCREMENT
        return f"file {self.path.name} seq {self.sequence} type {type_}\n"


@dataclass(frozen=True)
class Parts:
    """A multi-part append-only file as listed in its manifest: the base file, then the increments.

    With a damaged manifest they are listed from the manifest's readable lines and the file names.
    """

    parts: tuple[Part, ...]
    fault: str | None = None  # why the manifest cannot be used; None: it is whole, or not needed


@dataclass(frozen=True)
class Extent:
    """How far a file can be read: up to the end of its last whole command or transaction."""

    end: int  # bytes
    size: int  # bytes
    fault: str | None = None  # why the bytes from `end` on cannot be read; None: the file is whole
    written_at: float | None = None  # time of the last annotation before `end`, in unix seconds


class _Damage(Exception):
    """The bytes at a position are no command."""


def parts_of(folder: Path) -> Parts | None:
    """Return the files in the folder of a Redis; None if it has no append-only file yet."""
    inside = folder / FOLDER
    try:
        text = (inside / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if not _parts_on_disk(inside):
            return _single_file(folder)
        text = None
    if text is None:
        return Parts(_listed_again(inside, ()), f"{MANIFEST} is missing")
    listed, fault = _parse(inside, text)
    again = _listed_again(inside, listed)
    if fault is None:
        # Redis names a file before it writes to it.
        later = [part for part in again if part not in listed and part.path.stat().st_size]
        if not later:
            return Parts(listed)
        fault = f"it does not name {later[0].path.name}"
    return Parts(again, f"{MANIFEST}: {fault}")


def is_single_file(parts: Parts) -> bool:
    """Whether it is one file without a manifest, as Redis 6 writes it."""
    return parts.fault is None and len(parts.parts) == 1 and parts.parts[0].sequence == 0


def manifest(parts: list[Part]) -> bytes:
    """Return the content of the manifest."""
    return "".join(part.line for part in parts).encode()


def new_part(inside: Path, *, is_base: bool) -> Part:
    """Return a new file with an unused sequence number; `inside`: the folder of the manifest."""
    on_disk = _parts_on_disk(inside)
    sequence = 1 + max((part.sequence for part in on_disk), default=0)
    name = f"{NAME}.{sequence}.{'base' if is_base else 'incr'}.aof"
    return Part(inside / name, sequence, is_base)


def extent(path: Path, arities: Arities | None = None) -> Extent:
    """Read a file up to its first fault. `arities`: of the commands that Redis knows.

    Takes 3 s per 100 MB of commands, 10 s per 100 MB of a snapshot. Raises OSError.
    """
    size = path.stat().st_size
    if size == 0:
        return Extent(0, 0)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = 0
        if data[0] != ord("*") and data[0] != ord("#"):
            if _SNAPSHOT.match(data) is None:
                return Extent(0, size, "it begins with neither a snapshot nor a command")
            found = _end_of_snapshot(data)
            if found is None:
                return Extent(0, size, "its snapshot cannot be read")
            start = found
        return _read_commands(data, start, arities)


def may_have_zeros(path: Path) -> bool:
    """Whether a file may have parts that never reached the disk.

    Redis reads such zeros without an error where they are within a value, or from within the last
    value to the end of the file. Takes 0.03 s per 100 MB. Raises OSError.
    """
    if path.stat().st_size == 0:
        return False
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data[-1] == 0 or data.find(_UNWRITTEN) >= 0


def _single_file(folder: Path) -> Parts | None:
    path = folder / NAME
    return Parts((Part(path, 0, is_base=True),)) if path.is_file() else None


def _parse(inside: Path, text: bytes) -> tuple[tuple[Part, ...], str | None]:
    """Return the files that a manifest names before its first fault, and this fault."""
    parts: list[Part] = []
    for number, line in enumerate(text.decode(errors="replace").splitlines(keepends=True), 1):
        if line.startswith("#"):
            continue
        if not line.endswith("\n") or (found := _LINE.fullmatch(line.strip())) is None:
            return tuple(parts), f"line {number} cannot be read"
        quoted, name, sequence, type_ = found.groups()
        if type_ not in (_BASE, _INCREMENT):
            continue  # of type "h" (history): Redis removes this file
        part = Part(inside / (quoted or name), int(sequence), type_ == _BASE)
        increments = [one.sequence for one in parts if not one.is_base]
        if part.is_base and any(one.is_base for one in parts):
            return tuple(parts), f"line {number} names a second base file"
        if not part.is_base and increments and part.sequence <= increments[-1]:
            return tuple(parts), f"line {number} is out of order"
        parts.append(part)
    parts.sort(key=lambda one: not one.is_base)
    return tuple(parts), None if parts else "it names no file"


def _parts_on_disk(inside: Path) -> list[Part]:
    if not inside.is_dir():
        return []
    found = [(_PART.fullmatch(path.name), path) for path in inside.iterdir()]
    named = [(match, path) for match, path in found if match is not None]
    return [Part(path, int(match[1]), match[2] == "base") for match, path in named]


def _listed_again(inside: Path, listed: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return the listed files and, from the disk, the increments after them.

    Redis numbers a base file no higher than the commands that follow it.
    """
    on_disk = sorted(_parts_on_disk(inside), key=lambda part: part.sequence)
    bases = [part for part in (listed or on_disk) if part.is_base][-1:]
    increments = [part for part in listed if not part.is_base]
    if not bases and not increments:
        return ()
    first = (increments or bases)[0].sequence
    return (*bases, *(p for p in on_disk if not p.is_base and p.sequence >= first))


def _read_commands(data: mmap.mmap, start: int, arities: Arities | None) -> Extent:
    position = end = start
    unwritten = data.find(_UNWRITTEN, start)
    written_at = noted = None
    is_open = False  # within MULTI … EXEC
    fault = None
    try:
        while position < len(data):
            if data[position] == ord("#"):
                position, time = _annotation(data, position)
                noted = noted if time is None else time
            else:
                name, stop = _command(data, position, arities)
                if position <= unwritten < stop:
                    raise _Damage("zeros within a value")
                position = stop
                if name == b"multi" and is_open:
                    raise _Damage("a transaction within another")
                if name == b"exec" and not is_open:
                    raise _Damage("the end of a transaction that has no beginning")
                is_open = name == b"multi" or (is_open and name != b"exec")
            if not is_open:
                end, written_at = position, noted
        if is_open:
            fault = f"the transaction at byte {end:,} has no end"
    except _Damage as damage:
        fault = f"{damage}, at byte {position:,}"
    return Extent(end, len(data), fault, written_at)


def _annotation(data: mmap.mmap, position: int) -> tuple[int, float | None]:
    """Return the end of an annotation, and the time that it notes."""
    stop = data.find(b"\n", position, position + _LONGEST_ANNOTATION)
    if stop < 0:
        raise _Damage("an annotation without an end")
    found = re.fullmatch(rb"#TS:(\d{1,12})\r?\n", data[position : stop + 1])
    return stop + 1, None if found is None else float(found[1])


def _command(data: mmap.mmap, position: int, arities: Arities | None) -> tuple[bytes, int]:
    """Return the name of the command at a position, and its end."""
    num_words, position = _count(data, position, b"*")
    if num_words < 1:
        raise _Damage("a command without words")
    name = b""
    for word in range(num_words):
        length, start = _count(data, position, b"$")
        position = start + length + 2
        if position > len(data):
            raise _Damage("the file ends within a command")
        if data[position - 2 : position] != b"\r\n":
            raise _Damage("no command")
        if word == 0:
            name = data[start : start + length].lower()
    if arities is not None:
        arity = arities.get(name)
        if arity is None:
            raise _Damage("a command that Redis does not know")
        if num_words != arity and (arity > 0 or num_words < -arity):
            raise _Damage("a command with a wrong number of words")
    return name, position


def _count(data: mmap.mmap, position: int, mark: bytes) -> tuple[int, int]:
    """Return the number in the line at a position, and the end of this line."""
    if position >= len(data):
        raise _Damage("the file ends within a command")
    stop = data.find(b"\r\n", position, position + _LONGEST_COUNT)
    digits = data[position + 1 : stop]
    if data[position : position + 1] != mark or stop < 0 or not digits.isdigit():
        is_cut = stop < 0 and len(data) - position < _LONGEST_COUNT and b"\0" not in digits
        raise _Damage("the file ends within a command" if is_cut else "no command")
    return int(digits), stop + 2


def _end_of_snapshot(data: mmap.mmap) -> int | None:
    """Return where the snapshot at the beginning of a file ends; None if it cannot be read.

    Its end is where the checksum follows, so the format of its content need not be known. Of two
    such places one byte apart, the end is the one with a command or nothing after it: a value may
    end with the byte that ends a snapshot, and every 256th checksum then fits after both.
    """
    checksum = start = 0
    found = None
    while (stop := data.find(_SNAPSHOT_END, start)) >= 0 and (found is None or stop == start):
        checksum = _crc64(data[start : stop + 1], checksum)
        start = stop + 1
        end = start + _CHECKSUM_BYTES
        if data[start:end] == checksum.to_bytes(_CHECKSUM_BYTES, "little"):
            found = found or end
            if data[end : end + 1] in (b"", b"*", b"#"):
                return end
        elif found is not None:
            break
    if found is not None:
        return found
    # With `rdbchecksum no` it is zero, which alone proves nothing: only accepted at the end.
    tail = data[-1 - _CHECKSUM_BYTES :]
    return len(data) if tail == _SNAPSHOT_END + bytes(_CHECKSUM_BYTES) else None


def _crc64(data: bytes, checksum: int) -> int:
    """Continue the checksum of a snapshot (CRC-64 with Jones' polynomial) over more bytes."""
    table = _crc64_table()
    for byte in data:
        checksum = table[(checksum ^ byte) & 0xFF] ^ (checksum >> 8)
    return checksum


@cache
def _crc64_table() -> tuple[int, ...]:
    polynomial = 0x95AC9329AC4BC9B5  # bits reversed
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (polynomial if byte & 1 else 0)
        table.append(byte)
    return tuple(table)
