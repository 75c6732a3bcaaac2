"""Repair of the append-only file of the embedded Redis, for example after a power loss.

All commands before the first fault are kept, up to the end of the last whole command or
transaction; the rest is cut off. The damaged files are kept as a copy, by hard links where the file
system has them. No file is changed in place: the repaired last file gets a new name, and one rename
(of the manifest, or of the one file of Redis 6) switches to it. A repair that is killed at any
moment is finished or undone by the next start.

HOME/damaged/
  20261126-114234-123456/           the damaged files, and report.json (time in UTC)
  .partial-20261126-114234-123456/  the same, of a repair that was interrupted
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import orjson

from ...jobs.errors import Unavailable
from ...jobs.files import records
from ...jobs.files.atomic import fsync, whole_file, write_atomic
from . import aof_format
from .aof_format import Arities, Part, Parts

log = logging.getLogger(__name__)

MAX_COPIES = 3

_PARTIAL = ".partial-"
_REPORT = "report.json"
_BLOCK_BYTES = 1 << 20


class NoSpace(Unavailable):
    """The disk has no space for the repaired file; nothing was changed."""


@dataclass(frozen=True)
class Repair:
    """What a repair found and did."""

    at: float  # unix seconds
    fault: str  # the first fault of the manifest, base or an incremental file, with the file's name
    cut_bytes: int
    last_at: float | None  # unix seconds of the last command that was kept; None: none was kept
    copy: str  # the folder with the damaged files

    def describe(self) -> str:
        """Return it as one line."""
        last = "nothing was kept"
        if self.last_at is not None:
            last = f"last command kept: {datetime.fromtimestamp(self.last_at):%Y-%m-%d %H:%M:%S}"
        return (
            f"append-only file was damaged ({self.fault}): {self.cut_bytes:,} bytes cut, {last}; "
            f"copy in {self.copy}"
        )


@dataclass(frozen=True)
class _Report:
    repair: Repair
    new: str  # name of the file that the repair has written


@dataclass(frozen=True)
class _Plan:
    """Which files are kept as they are, and which one is cut."""

    whole: list[Part]
    last: Part | None  # copied to a new file, up to `end`; None: the new file is empty
    end: int  # bytes
    fault: str
    cut_bytes: int
    last_at: float | None


def is_suspect(folder: Path) -> bool:
    """Whether the append-only file must be checked before Redis reads it. Raises OSError.

    Redis would refuse, start empty and append to old files, or take zeros for values.
    """
    found = aof_format.parts_of(folder)
    if found is None or found.fault is not None:
        return found is not None
    paths = [part.path for part in found.parts if part.path.exists()]
    # Redis checks the checksum of a snapshot itself.
    return any(aof_format.may_have_zeros(path) for path in paths if path.suffix != ".rdb")


def reports(copies: Path) -> list[Repair]:
    """Return the repairs whose copies are still there, the latest first."""
    found = [_read_report(copy) for copy in sorted(_complete(copies), reverse=True)]
    return [report.repair for report in found if report is not None]


@dataclass(frozen=True)
class Repairer:
    """Repairs the append-only file of one Redis, which must not run meanwhile."""

    folder: Path  # where Redis writes
    copies: Path  # the folder of the copies

    def repair(self, arities: Callable[[], Arities]) -> Repair | None:
        """Cut the append-only file at its first fault; None if it has none.

        `arities`: called for the commands that Redis knows. Raises NoSpace; OSError if a file
        cannot be read.
        """
        parts = aof_format.parts_of(self.folder)
        if parts is None:
            return None
        plan = _plan(parts, arities())
        if plan is None:
            return None
        log.error("Redis: append-only file: %s", plan.fault)
        try:
            return self._carry_out(parts, plan)
        except OSError as error:
            for partial in self._partial():
                if not self._is_switched(partial):
                    self._undo(partial)
            raise NoSpace(
                f"Redis: {plan.fault}: its repair needs {plan.end:,} bytes in {self.folder}: "
                f"{error.strerror}; nothing was changed"
            ) from error

    def finish_interrupted(self) -> list[Repair]:
        """Finish repairs that were killed after their switch, and undo those before it."""
        finished = []
        for partial in self._partial():
            report = _read_report(partial)
            if report is not None and self._is_switched(partial):
                finished.append(report.repair)
                self._finish(partial, report.repair)
            else:
                self._undo(partial)
        return finished

    def _carry_out(self, parts: Parts, plan: _Plan) -> Repair:
        now = datetime.now(UTC)
        name = f"{now:%Y%m%d-%H%M%S-%f}"
        partial = self.copies / f"{_PARTIAL}{name}"
        self.copies.mkdir(mode=0o700, exist_ok=True)
        partial.mkdir(mode=0o700)
        is_single = aof_format.is_single_file(parts)
        inside = self.folder if is_single else self.folder / aof_format.FOLDER
        for path in inside.glob(f"{aof_format.NAME}*"):
            _link(path, partial / path.name)
        # Also a whole last file is written anew: Redis appends to it, and the copy would change.
        is_base = plan.last is not None and plan.last.is_base
        new = parts.parts[0] if is_single else aof_format.new_part(inside, is_base=is_base)
        made = Repair(
            now.timestamp(), plan.fault, plan.cut_bytes, plan.last_at, str(self.copies / name)
        )
        report = _Report(made, new.path.name)
        write_atomic(partial / _REPORT, orjson.dumps(report, option=orjson.OPT_INDENT_2))
        fsync(self.copies)
        fsync(self.copies.parent)
        _write_prefix(None if plan.last is None else plan.last.path, plan.end, new.path)
        if not is_single:
            write_atomic(inside / aof_format.MANIFEST, aof_format.manifest([*plan.whole, new]))
        self._finish(partial, made)
        return made

    def _undo(self, partial: Path) -> None:
        """Remove what an interrupted repair has written before its switch."""
        report = _read_report(partial)
        if report is not None and report.new != aof_format.NAME:
            (self.folder / aof_format.FOLDER / report.new).unlink(missing_ok=True)
        shutil.rmtree(partial)

    def _finish(self, partial: Path, made: Repair) -> None:
        """Remove what a repair has replaced, and give its copy the final name."""
        inside = self.folder / aof_format.FOLDER
        parts = aof_format.parts_of(self.folder)
        if parts is not None and not aof_format.is_single_file(parts) and parts.fault is None:
            listed = {part.path.name for part in parts.parts} | {aof_format.MANIFEST}
            for path in inside.glob(f"{aof_format.NAME}*"):
                if path.name not in listed:
                    path.unlink()
        copy = partial.with_name(partial.name.removeprefix(_PARTIAL))
        partial.rename(copy)
        fsync(self.copies)
        for old in sorted(_complete(self.copies), reverse=True)[MAX_COPIES:]:
            shutil.rmtree(old, ignore_errors=True)
        log.warning("Redis: %s", made.describe())

    def _is_switched(self, partial: Path) -> bool:
        """Whether the interrupted repair of a copy had replaced the damaged files."""
        report = _read_report(partial)
        if report is None:
            return False
        if report.new == aof_format.NAME:
            # A repaired file is shorter; one that Redis 7 has moved into its folder was repaired.
            now = self.folder / aof_format.NAME
            return not now.exists() or now.stat().st_size != (partial / now.name).stat().st_size
        now = self.folder / aof_format.FOLDER / aof_format.MANIFEST
        return _content(now) != _content(partial / aof_format.MANIFEST)

    def _partial(self) -> list[Path]:
        return list(self.copies.glob(f"{_PARTIAL}*"))


def _plan(parts: Parts, arities: Arities) -> _Plan | None:
    whole: list[Part] = []
    last: Part | None = None
    fault, end, cut_bytes, last_at = parts.fault, 0, 0, None
    is_cut = False
    for part in parts.parts:
        if is_cut:
            with contextlib.suppress(FileNotFoundError):
                cut_bytes += part.path.stat().st_size
            continue
        try:
            found = aof_format.extent(part.path, arities)
            changed_at = part.path.stat().st_mtime
        except FileNotFoundError:
            is_cut, fault = True, fault or f"{part.path.name} is missing"
            continue
        if found.end:
            last_at = found.written_at or changed_at
        if found.fault is not None:
            is_cut, fault = True, fault or f"{part.path.name}: {found.fault}"
            cut_bytes += found.size - found.end
        if found.fault is None and part.is_base:
            whole.append(part)
        elif found.fault is not None and not found.end:
            continue
        else:
            if last is not None:
                whole.append(last)
            last, end = part, found.end
    if fault is None:
        return None
    return _Plan(whole, last, end, fault, cut_bytes, last_at)


def _write_prefix(source: Path | None, end: int, target: Path) -> None:
    """Write the first `end` bytes of a file to another or the same file, atomically."""
    with contextlib.ExitStack() as stack:
        reading = None if source is None else stack.enter_context(open(source, "rb"))
        writing = stack.enter_context(whole_file(target, mode=0o600))
        left = end
        while reading is not None and left:
            block = reading.read(min(_BLOCK_BYTES, left))
            writing.write(block)
            left -= len(block)


def _read_report(copy: Path) -> _Report | None:
    """Return the report in a copy; None if the repair was interrupted before it."""
    return records.read(copy / _REPORT, _Report)


def _content(path: Path) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:  # a file system without hard links
        shutil.copy2(path, target)
        fsync(target)


def _complete(copies: Path) -> list[Path]:
    return [path for path in copies.glob("*") if path.is_dir() and path.name[0] != "."]
