"""User modules: imported afresh for every job, and identified by content digests.

The folders of a job come first on sys.path, like the folder of a script: a user module takes
precedence over a library of the same name.
"""

from __future__ import annotations

import importlib
import itertools
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import SpecError
from ..files import umask
from . import tracebacks

SOURCES = "sources"  # key of the digests in a checkpoint's manifest

# An entry of sys.modules for each open `own_modules`: the modules of its job follow, as a dict
# keeps the order of insertion. Comparing with a copy of sys.modules would touch every module, and
# a forked process copies each page that it touches: 16 ms of a job's start.
_BOUNDARY = "warmd: modules of a job follow"
_boundaries: list[str] = []
_restored: dict[str, ModuleType] = {}  # loaded before the first boundary, now after it


def _names_since(boundary: str) -> list[str]:
    """Return the names of the modules behind an entry of sys.modules, the latest first."""
    # This loop runs no Python code, so no other thread can change the dict meanwhile.
    return list(itertools.takewhile(boundary.__ne__, reversed(sys.modules)))


@contextmanager
def own_modules(folders: Sequence[str]) -> Iterator[None]:
    """Put `folders` first on sys.path in this block; unload user modules at its end.

    Otherwise a process would run the code of an earlier job. Not thread-safe: sys.path and
    sys.modules are global.
    """
    path = list(sys.path)
    boundary = f"{_BOUNDARY} {len(_boundaries)}"
    _boundaries.append(boundary)
    sys.modules[boundary] = ModuleType(boundary)
    writes_bytecode = sys.dont_write_bytecode
    # Bytecode is validated by size and mtime in seconds only: stale code could be used.
    sys.dont_write_bytecode = True
    sys.path[:0] = folders
    _forget_listings(folders)
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes_bytecode
        sys.path[:] = path
        for name in _own(boundary):
            if sys.modules[name] is not _restored.get(name):
                del sys.modules[name]
        del sys.modules[boundary]
        _boundaries.remove(boundary)
        if not _boundaries:
            _restored.clear()


def _forget_listings(folders: Sequence[str]) -> None:
    """Make imports list the folders and those below again, except libraries' (a `.venv`).

    A change right after a listing may leave a folder's mtime as it was. Libraries are left alone
    because `importlib.invalidate_caches` writes to thousands of objects.
    """
    for path in list(sys.path_importer_cache):
        is_below = any(f"{path}/".startswith(f"{folder}/") for folder in folders)
        if is_below and is_own(f"{path}/"):
            del sys.path_importer_cache[path]


def load(name: str) -> ModuleType:
    """Import the module that sys.path leads to, even if a library of that name is already loaded.

    The library stays loaded under its name for all other importers.
    """
    top = name.partition(".")[0]
    found = PathFinder.find_spec(top)
    if top in sys.modules and found is not None and is_own(found.origin or ""):
        spec = sys.modules[top].__spec__
        if spec is None or spec.origin != found.origin:
            return _load_aside(name, found)
    return importlib.import_module(name)


def _load_aside(name: str, found: ModuleSpec) -> ModuleType:
    """Import a module whose top-level name is taken by another loaded module."""
    of_jobs = set(_names_since(_boundaries[0])) if _boundaries else set()
    hidden = _taken_out(found.name)
    _restored.update((name, hidden[name]) for name in hidden.keys() - of_jobs)
    try:
        module = module_from_spec(found)
        sys.modules[found.name] = module
        assert found.loader is not None  # it has a file
        found.loader.exec_module(module)
        return importlib.import_module(name)
    finally:
        own = _taken_out(found.name)
        sys.modules.update(hidden)
        # Kept for `digests`, under names that no import statement can have.
        sys.modules.update({f"{found.origin}:{name}": module for name, module in own.items()})


def _taken_out(top: str) -> dict[str, ModuleType]:
    """Remove a module and its submodules from sys.modules; return them by name."""
    names = [name for name in sys.modules if name == top or name.startswith(f"{top}.")]
    return {name: sys.modules.pop(name) for name in names}


def named(option: str, name: str) -> Any:
    """Import `module:name`; return what has the name, None if nothing has. Raises SpecError.

    Files that the module creates get the user's umask.
    """
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py"):  # of a module `mine` the submodule `py`, for Python
        meant = f"{module_name.removesuffix('.py')}:{attribute}"
        raise SpecError(option, f"must be MODULE:NAME, got {name}: type {meant}")
    try:
        with umask.users():
            module = load(module_name)
    # Any error of the user's module, sys.exit() included, becomes one line.
    except (Exception, SystemExit) as error:
        reason = tracebacks.reason(error)
        raise SpecError(option, f"{name} must import, got {reason}") from error
    return getattr(module, attribute, None)


def digests(known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the sha256 of every loaded source file of user code, by path.

    Digests in `known` are kept: a file that was edited after it was loaded differs from the running
    code.
    """
    found = dict(known or {})
    boundary = _boundaries[0] if _boundaries else None
    for file in sorted({str(path) for path in _own(boundary).values()} - found.keys()):
        digest = _digest(file)
        if digest is not None:
            found[file] = digest
    return found


def changed(recorded: Mapping[str, str]) -> list[str]:
    """Return the paths whose content differs from the recorded digest, or that are gone."""
    return [file for file, digest in recorded.items() if _digest(file) != digest]


def is_own(file: str) -> bool:
    """Whether a source file is user code: neither a library's nor warmd's."""
    # By text: a process has thousands of modules, and each job checks all of them.
    if not file.startswith("/") or "/site-packages/" in file or "/dist-packages/" in file:
        return False
    return not os.path.normpath(file).startswith(library_folders())


def _own(boundary: str | None) -> dict[str, Path]:
    """Return the user modules loaded since a boundary, or all: name -> file."""
    found = {}
    for name in list(sys.modules) if boundary is None else _names_since(boundary):
        file = getattr(sys.modules.get(name), "__file__", None)
        if name != "__main__" and isinstance(file, str) and is_own(file):
            found[name] = Path(file)
    return found


def _digest(file: str) -> str | None:
    try:
        return sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None


@cache
def library_folders() -> tuple[str, ...]:
    """The folders of libraries and of warmd, each with a slash at its end; found once."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    warmd = Path(__file__).parents[2]
    folders = {Path(sysconfig.get_path(name)) for name in names}
    # warmd's sources as imported, and as the links of a checkout resolve.
    parts = {(warmd / part).resolve() for part in ("cli", "configs", "daemon", "jobs")}
    folders |= {Path(site.getusersitepackages()), warmd} | parts
    return tuple(f"{folder}/" for folder in folders)
