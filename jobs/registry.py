"""The registry of job kinds: warmd's own, and those of other installed packages.

A package declares a kind by an entry point; its name is the kind's, its value the Spec class:

    [project.entry-points."warmd.kinds"]
    wordcount = "warmd_wordcount.options:WordcountSpec"

Entry points are read once per process, when a kind is requested that is not warmd's own. A kind
that cannot be used is left out and reported (`Kinds.faults`). Imports no heavy library.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ..configs.queues import QUEUES

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "warmd.kinds"  # of entry points
_RESERVED = ("sweep", "curriculum")  # begin the ids of groups
_NAME = re.compile(r"[a-z][a-z0-9]{0,15}")  # it begins the ids of its jobs


class Kind(NamedTuple):
    """The modules of a kind, and the name of its Spec class; a leading dot: within warmd.jobs."""

    options: str  # has the Spec
    spec: str
    module: str  # has `run`
    heavy: str  # imports torch and other slow libraries


class Kinds(Mapping[str, Kind]):
    """All kinds by name: warmd's own first, then those of other packages."""

    def __init__(self, own: Mapping[str, Kind]) -> None:
        self.own = own

    def __getitem__(self, name: str) -> Kind:
        if name in self.own:  # without reading the installed packages, which takes 30 ms
            return self.own[name]
        return self.outside[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from self.outside

    def __len__(self) -> int:
        return len(self.own) + len(self.outside)

    @property
    def outside(self) -> dict[str, Kind]:
        """The kinds of other packages."""
        return self._found[0]

    @property
    def faults(self) -> list[str]:
        """Why kinds of other packages were left out, one line each."""
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[dict[str, Kind], list[str]]:
        from importlib.metadata import entry_points

        found: dict[str, Kind] = {}
        faults = []
        for entry in entry_points(group=GROUP):
            try:
                if entry.name in (*self.own, *found, *_RESERVED):
                    raise TypeError("there is another kind of this name")
                found[entry.name] = _load(entry)
            except (Exception, SystemExit) as error:  # its module is code, which can raise anything
                faults.append(_fault(entry, error))
        return found, faults


def _load(entry: EntryPoint) -> Kind:
    """Return the kind of an entry point. Raises whatever its module raises; TypeError."""
    if not _NAME.fullmatch(entry.name):
        raise TypeError("its name must be a letter and up to 15 letters or digits, all lowercase")
    from importlib.util import find_spec

    from .spec import Spec

    spec = entry.load()
    if not (isinstance(spec, type) and issubclass(spec, Spec)):
        raise TypeError(f"{entry.value} must be a class derived from warmd.jobs.spec.Spec")
    if "__dataclass_fields__" not in vars(spec):
        raise TypeError(f"{entry.value} must be a dataclass (frozen=True, kw_only=True)")
    for name, value, allowed in (
        ("kind", getattr(spec, "kind", None), (entry.name,)),
        ("queue", spec.queue, QUEUES),
    ):
        if value not in allowed:
            raise TypeError(f"{name} of {entry.attr} must be {' or '.join(allowed)}, got {value!r}")
    if spec.run_module is None or find_spec(spec.run_module) is None:
        raise TypeError(
            f"run_module of {entry.attr} must be a module that is installed, got "
            f"{spec.run_module!r}"
        )
    options = spec.options()
    if spec.http is not None:
        missing = {"model", "seed", spec.http.training_file} - options.keys()
        if missing:
            raise TypeError(f"http of {entry.attr} needs the options {', '.join(sorted(missing))}")
    return Kind(entry.module, entry.attr, spec.run_module, spec.run_module)


def _fault(entry: Any, error: BaseException) -> str:
    package = entry.dist.name if entry.dist is not None else "an unknown package"
    reason = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, TypeError):
        reason = f"{type(error).__name__}: {reason}"
    return f"{entry.name} of {package}: {reason}"[:300]
