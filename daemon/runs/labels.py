"""Labels of a job, for people: name, tags and notes, in `labels.json` of its run directory.

They do not affect what a job computes, so they may be added at any time. A job without the file,
such as one of an earlier version, has none.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

import orjson

from ...jobs.errors import SpecError
from ...jobs.files.atomic import write_atomic
from ...jobs.ids import by_time, is_job_id
from .rundir import RunDir, job_ids

_WORD = re.compile(r"[^\W_][\w.+=:@/-]{0,63}")
_TAKES = "1 to 64 letters, digits or . _ + = : @ / -, beginning with a letter or digit"
_MAX_TAGS = 20
_MOST_LISTED = 4  # of the ids that share a name
_MAX_NOTES = 100
_MAX_NOTE = 2000  # characters


@dataclass(frozen=True)
class Note:
    """A remark on a job."""

    time: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The name, tags and notes of a job."""

    name: str | None = None
    tags: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()

    @classmethod
    def parse(cls, name: str | None = None, tags: Sequence[str] = ()) -> Self:
        """Check the name and the tags of a new job. Raises SpecError."""
        if name is not None and (not is_name(name) or is_job_id(name)):
            problem = "another word than a job id" if is_name(name) else _TAKES
            raise SpecError("name", f"must be {problem}, got {_shown(name)}")
        for tag in tags:
            if not is_name(tag):
                raise SpecError("tag", f"must be {_TAKES}, got {_shown(tag)}")
        if len(set(tags)) > _MAX_TAGS:
            raise SpecError("tag", f"must be given at most {_MAX_TAGS} times, got {len(set(tags))}")
        return cls(name=name, tags=tuple(dict.fromkeys(tags)))

    def fits(self, wanted: Labels) -> bool:
        """Whether these have all tags of `wanted`, and a name that matches its name.

        In the wanted name `*`, `?` and `[…]` match as in file names.
        """
        has_name = wanted.name is None or fnmatchcase(self.name or "", wanted.name)
        return has_name and set(wanted.tags) <= set(self.tags)


NO_LABELS = Labels()


def is_name(text: str) -> bool:
    """Whether the text may be the name or a tag of a job."""
    return _WORD.fullmatch(text) is not None


def ambiguous(field: str, name: str, ids: Sequence[str], what: str = "jobs") -> SpecError:
    """Return the refusal of a name that several have; `field`: the option that has the name."""
    return SpecError(field, f"{name!r} is the name of {len(ids)} {what}: {first_of(ids)}")


def first_of(ids: Sequence[str]) -> str:
    """Return the first few of many ids, in words."""
    return ", ".join(ids[:_MOST_LISTED]) + (", …" if len(ids) > _MOST_LISTED else "")


def read(rundir: RunDir) -> Labels:
    """Return the labels of a job; damaged parts count as missing."""
    try:
        document = orjson.loads(_path(rundir).read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return NO_LABELS
    if not isinstance(document, dict):
        return NO_LABELS
    name, tags, notes = (document.get(part) for part in ("name", "tags", "notes"))
    return Labels(
        name=name if isinstance(name, str) else None,
        tags=tuple(tag for tag in _items(tags) if isinstance(tag, str)),
        notes=tuple(note for item in _items(notes) if (note := _note(item)) is not None),
    )


def write(rundir: RunDir, labels: Labels) -> None:
    """Store the labels of a job; without any, no file."""
    if labels != NO_LABELS:
        write_atomic(_path(rundir), orjson.dumps(asdict(labels), option=orjson.OPT_INDENT_2))


def add_note(rundir: RunDir, text: str) -> Labels:
    """Add a note to a job's labels, and return them. Raises SpecError."""
    text = text.strip()
    is_plain = all(c.isprintable() or c == "\n" for c in text)
    if not text or len(text) > _MAX_NOTE or not is_plain:
        takes = f"1 to {_MAX_NOTE} printable characters"
        raise SpecError("note", f"must be {takes}, got {_shown(text)}")
    with rundir.revising():
        labels = read(rundir)
        if len(labels.notes) >= _MAX_NOTES:
            raise SpecError("note", f"must be one of at most {_MAX_NOTES} of {rundir.path.name}")
        labels = replace(labels, notes=(*labels.notes, Note(round(time.time(), 3), text)))
        write(rundir, labels)
    return labels


def fitting(runs: Path, wanted: Labels) -> list[str]:
    """Return the ids of the jobs with labels that fit, newest first."""
    ids = sorted(job_ids(runs), key=by_time, reverse=True)
    labeled = (job_id for job_id in ids if _path(RunDir(runs / job_id)).is_file())
    return [job_id for job_id in labeled if read(RunDir(runs / job_id)).fits(wanted)]


def _path(rundir: RunDir) -> Path:
    return rundir.path / "labels.json"


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _note(item: Any) -> Note | None:
    if not isinstance(item, dict) or not isinstance(item.get("text"), str):
        return None
    at = item.get("time")
    return Note(float(at) if isinstance(at, int | float) else 0.0, item["text"])


def _shown(text: str) -> str:
    return ascii(text[:80])
