"""Differences between two jobs: options, model, data, code, versions and results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...jobs import KINDS, spec_class
from ...jobs.errors import Conflict, NotFound
from ..runs import events, source
from ..runs.rundir import RunDir
from ..runs.source import Source


@dataclass(frozen=True)
class Difference:
    """One value that two jobs do not share; None: a job has none."""

    section: str
    name: str
    one: Any
    other: Any


def differences(one: RunDir, other: RunDir) -> list[Difference]:
    """Return the differences between two jobs, by section. Raises NotFound and Conflict."""
    about_one, about_other = _about(one), _about(other)
    return [
        Difference(section, name, values.get(name), others.get(name))
        for section in about_one
        for values, others in [(about_one[section], about_other[section])]
        for name in {**values, **others}
        if values.get(name) != others.get(name)
    ]


def _about(rundir: RunDir) -> dict[str, dict[str, Any]]:
    """All that may differ, by section and name."""
    document = rundir.read_spec()
    kept = source.read(rundir)
    options = _options(document)
    result = rundir.read_result() or {}
    return {
        "options": {"kind": document["kind"], **options},
        "model": {
            **{k: (document.get("model") or {}).get(k) for k in ("path", "dtype", "precision")},
            "init_from": document.get("init_from"),
            "weights": _weights(rundir),
        },
        "data": {name: _identity(about) for name, about in kept.data.items()},
        "code": _code(kept),
        "versions": dict(kept.executions[-1].versions) if kept.executions else {},
        "result": dict(_numbers(result)),
    }


def _options(document: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a job, with the defaults of those that its version did not have."""
    kind, options = document["kind"], document["spec"]
    defaults = {}
    if kind in KINDS:
        for name, info in spec_class(kind).options().items():
            value = info.default
            defaults[name] = list(value) if isinstance(value, tuple) else value
    return {**defaults, **options}


def _weights(rundir: RunDir) -> str | None:
    """The digest of the model that its latest execution loaded."""
    for event in events.newest(rundir.events, _RECENT):
        if event["type"] == "started" and event.get("weights"):
            return str(event["weights"]["digest"])
    with suppress(Conflict, NotFound):
        found = (rundir.read_result() or {}).get("weights") or {}
        return found.get("digest")
    return None


_RECENT = 1000


def _identity(about: Mapping[str, Any]) -> Any:
    """The identity of a data file: its content, or else its size and modification time."""
    return about.get("digest") or [about.get("bytes"), about.get("modified")]


def _code(kept: Source) -> dict[str, Any]:
    """The git commit and the digests of user modules, by their paths below the job's folder."""
    git = kept.git or {}
    found: dict[str, Any] = {"commit": git.get("commit")}
    if kept.executions:
        for path, digest in kept.executions[-1].files.items():
            found[_relative(path, kept.folder)] = digest[:12]
    return found


def _relative(path: str, folder: str | None) -> str:
    is_below = folder is not None and Path(path).is_relative_to(folder)
    return str(Path(path).relative_to(folder)) if folder is not None and is_below else path


def _numbers(result: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers of a result; nested ones get names like `metrics.loss`."""
    for name, value in result.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, value
