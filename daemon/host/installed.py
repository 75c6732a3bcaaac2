"""Installed software: the versions and digests of warmd and of the libraries that compute.

The daemon records the versions of its processes at their start, to detect an upgrade.
Nothing is imported: a library is identified by the list of its files (RECORD) that the installer
wrote, which has a hash of each; warmd by its sources.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "tokenizers", "safetensors")

_WARMD = "warmd"
_VERSION = re.compile(r'^__version__ = "([^"]+)"', re.MULTILINE)
_MISSING = "not installed"
_SETTLED_NS = 1_000_000_000  # since the last change of a file

# Sources that define the protocol between the processes of a daemon.
_PROTOCOL = (
    *("daemon/host/messages.py", "daemon/host/channel.py", "daemon/queue/keys.py"),
    *("configs/config.py", "jobs/context.py"),
)


@dataclass(frozen=True)
class Package:
    """An installed package."""

    version: str
    digest: str  # of its sources, or of the installer's list of its files
    folder: str  # that it was found in


Installed = Mapping[str, Package]  # by the name of the package


def installed() -> dict[str, Package]:
    """Return the versions that a process would import now."""
    found = {_WARMD: _warmd(Path(__file__).parents[2])}
    for name in LIBRARIES:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            found[name] = _library(name, Path(spec.submodule_search_locations[0]).parent)
    return found


def refreshed(before: Installed) -> dict[str, Package]:
    """Return the versions that are in the same folders now."""
    return {
        name: _warmd(Path(package.folder))
        if name == _WARMD
        else _library(name, Path(package.folder))
        for name, package in before.items()
    }


def changes(before: Installed, after: Installed) -> list[str]:
    """Return in words how packages differ: `torch 2.8.0 -> 2.9.0`."""
    found = []
    for name, old in before.items():
        new = after[name]
        if new.version != old.version:
            found.append(f"{name} {old.version} -> {new.version}")
        elif new.digest != old.digest:
            found.append(f"{name} {old.version} with other files")
    return found


def protocol() -> str:
    """Return a digest of the protocol that the processes of one daemon must share."""
    root = Path(__file__).parents[2]
    return _digest([str(root / part) for part in _PROTOCOL])


def to_json(found: Installed) -> dict[str, dict[str, str]]:
    return {name: asdict(package) for name, package in found.items()}


def from_json(document: object) -> dict[str, Package]:
    """Read what `to_json` wrote; nothing from a daemon of a version that recorded nothing."""
    if not isinstance(document, dict):
        return {}
    try:
        return {str(name): Package(**fields) for name, fields in document.items()}
    except TypeError:
        return {}


def _warmd(root: Path) -> Package:
    paths = [
        os.path.join(folder, name)
        for folder, _, names in os.walk(root, followlinks=True)
        for name in names
        if name.endswith(".py")
    ]
    try:
        found = _VERSION.search((root / "__init__.py").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        found = None
    version = _MISSING if found is None else found[1]
    return Package(version, _digest(sorted(paths)), str(root))


def _library(name: str, folder: Path) -> Package:
    for about in sorted(folder.glob(f"{name}-*.dist-info")):
        version = about.name.removeprefix(f"{name}-").removesuffix(".dist-info")
        return Package(version, _digest([str(about / "RECORD")]), str(folder))
    return Package(_MISSING, "", str(folder))


def _digest(paths: list[str]) -> str:
    """Return a digest of names and contents, which are read again only when a file has changed.

    The supervisor asks at each status, and would stand still for 40 ms while it reads.
    """
    files = [(path, _version_of(path)) for path in paths]
    first = next(iter(paths), "")
    known = _known.get(first)
    if known is None or known[0] != files:
        known = _known[first] = (files, _read_digest(paths))
    return known[1]


# By the first of the files: all of them as they were before they were read, and their digest.
_known: dict[str, tuple[list[tuple[str, object]], str]] = {}


def _version_of(path: str) -> object:
    """Return what changes with the content of a file; None if there is none."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    if time.time_ns() - stat.st_ctime_ns < _SETTLED_NS:
        return object()  # equal to no other: its times are too coarse to show the next change
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _read_digest(paths: list[str]) -> str:
    digest = blake2b(digest_size=8)
    for path in paths:
        try:
            content = Path(path).read_bytes()
        except OSError:  # being replaced
            content = b""
        name = os.fsencode(os.path.basename(path))
        digest.update(b"%d %b %d " % (len(name), name, len(content)))
        digest.update(content)
    return digest.hexdigest()
