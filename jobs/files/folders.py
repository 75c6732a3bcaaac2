"""Finds the files of a data folder, by the rules of the library `datasets`.

Hidden files and folders are left out: copies that an editor or a file system keeps beside a file
(`.ipynb_checkpoints/`, `._rows.jsonl`, `__MACOSX/`) would be read as further records, and as copies
of trained records among those held out. Everything that is left out is counted and named.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Why a file or folder is left out.
HIDDEN, INDEX, LINKS, OTHERS, SKIPPED = "hidden", "index", "links", "others", "skipped"
SAME = "same"
_HIDING = (".", "__")  # prefixes of the names of hidden folders
# Descriptions of data sets, by `datasets` and other trainers; they have no records.
_INDEX_FILES = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
_NAMED = 5  # files that are named
# Words in names of files and folders by which `datasets` divides a folder into splits.
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_WORD = re.compile(r"[a-z]+")


@dataclass
class LeftOut:
    """The files and folders that were left out for one reason."""

    count: int = 0
    names: list[str] = field(default_factory=list)  # of the first ones, relative to the folder

    def add(self, name: str) -> None:
        """Count a file or folder."""
        self.count += 1
        if len(self.names) < _NAMED:
            self.names.append(name)


@dataclass(frozen=True)
class Found:
    """The files of a folder that are read, in a reproducible order, and those left out."""

    files: list[Path]
    left_out: dict[str, LeftOut] = field(default_factory=dict)  # by reason
    splits: list[str] = field(default_factory=list)  # splits in the names of the files, if several

    @property
    def note(self) -> str | None:
        """What was left out, in a sentence; None: nothing."""
        return "; ".join(_described(*item) for item in self.left_out.items()) or None


def files_in(
    folder: Path,
    suffixes: Collection[str],
    *,
    hiding: tuple[str, ...] = _HIDING,
    skipped: Collection[str] = (),
) -> Found:
    """Return the files with these suffixes, in lower or upper case, below a folder.

    A file with several names, by hard or symbolic links, is listed once. `hiding`: prefixes of the
    names of hidden folders. `skipped`: names of folders to leave out.
    Raises OSError for a folder that cannot be read.
    """
    found = Found([])
    for name, reason in sorted(_walk(folder, suffixes, hiding, skipped), key=lambda pair: pair[0]):
        if reason is None:
            found.files.append(folder / name)
        else:
            found.left_out.setdefault(reason, LeftOut()).add(name)
    repeated = _repeated(found.files)
    for path in repeated:
        found.left_out.setdefault(SAME, LeftOut()).add(str(path.relative_to(folder)))
    found.files[:] = sorted({*found.files}.difference(repeated))
    splits = {split for path in found.files if (split := _split_of(path.relative_to(folder)))}
    found.splits.extend(sorted(splits) if "train" in splits and len(splits) > 1 else ())
    return found


def _repeated(files: Collection[Path]) -> list[Path]:
    """Return all paths but one of each file; the remaining one is no symbolic link if possible."""
    known = set[tuple[int, int]]()
    repeated = []
    for path in sorted(files, key=lambda path: (path.is_symlink(), path)):
        found = path.stat()
        identity = (found.st_dev, found.st_ino)
        if identity in known:
            repeated.append(path)
        known.add(identity)
    return repeated


def _split_of(path: Path) -> str | None:
    """Return the split that the name of a file, or else of a folder around it, has as a word."""
    for part in reversed(path.parts):
        for word in _WORD.findall(part.lower()):
            if word in _SPLITS:
                return _SPLITS[word]
    return None


def has_suffix(path: Path, suffixes: Collection[str]) -> bool:
    """Whether a file has one of these suffixes, in lower or upper case."""
    return path.suffix.lower() in suffixes


def _walk(
    folder: Path, suffixes: Collection[str], hiding: tuple[str, ...], skipped: Collection[str]
) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each file, and of each folder that is not entered, with the reason."""
    for place, folders, names in os.walk(folder, onerror=_raise):
        inside = Path(place).relative_to(folder)
        for name in [*folders]:
            if name in skipped:
                reason = SKIPPED
            elif name.startswith(hiding):
                reason = HIDDEN
            elif Path(place, name).is_symlink():
                reason = LINKS
            else:
                continue
            folders.remove(name)
            yield f"{inside / name}/", reason
        for name in names:
            yield str(inside / name), _why_left_out(Path(place, name), suffixes)


def _why_left_out(path: Path, suffixes: Collection[str]) -> str | None:
    if path.name.startswith("."):
        return HIDDEN
    if not has_suffix(path, suffixes) or not path.is_file():
        return OTHERS
    return INDEX if path.name in _INDEX_FILES else None


def _raise(error: OSError) -> None:
    raise error


_WORDS = {
    HIDDEN: "hidden",
    INDEX: "descriptions of data sets",
    LINKS: "links to folders",
    OTHERS: "of other types",
    SAME: "links to files that are read",
    SKIPPED: "folders of tests or packages",
}


def _described(reason: str, found: LeftOut) -> str:
    more = ", …" if found.count > len(found.names) else ""
    return f"{found.count} {_WORDS[reason]} ({', '.join(found.names)}{more})"
