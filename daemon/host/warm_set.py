"""The wanted models: the configured ones, plus those loaded since, minus those unloaded.

Kept in a file, so that a restarted zygote, supervisor or daemon loads the same models, and so that
the command line can distinguish the name of a warm model from a folder.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import orjson

from ...configs.config import ModelConfig
from ...jobs.files import records
from ...jobs.files.atomic import write_atomic
from .home import Home


@dataclass
class _Stored:
    """The content of the file."""

    life: str
    models: list[ModelConfig]  # wanted now
    kept: list[str] = field(default_factory=list)  # names that the next start loads as well
    on_demand: list[ModelConfig] = field(default_factory=list)  # loaded for jobs


class WarmSet:
    """The wanted models of one daemon.

    `life` identifies one run of the daemon (SharedFlags.run_id). A new run starts with the
    configured models and those of `warmd load` without --once. Threads may change it at the same
    time: the file has the changes of all.
    """

    def __init__(self, home: Home, configured: Iterable[ModelConfig], life: str) -> None:
        self._home = home
        self._life = life
        self._lock = threading.RLock()  # of the attributes below and the file
        stored = _read(home)
        by_name = {model.name: model for model in stored.models}
        self._kept = {name: by_name[name] for name in stored.kept if name in by_name}
        wanted = {model.name: model for model in configured}
        self._configured = set(wanted)
        self._models = {**self._kept, **wanted}  # the settings win for the same name
        self._on_demand: list[ModelConfig] = []
        if stored.life == life:
            self._models = by_name

    def models(self) -> list[ModelConfig]:
        with self._lock:
            return list(self._models.values())

    def is_required(self, name: str) -> bool:
        """Whether a daemon cannot start without the model: it is in its settings."""
        return name in self._configured

    def add(self, model: ModelConfig, *, is_kept: bool) -> None:
        """Add a model to the set; with `is_kept` also for later starts."""
        with self._lock:
            self._models[model.name] = model
            self._kept.pop(model.name, None)
            if is_kept:
                self._kept[model.name] = model
            self.write()

    def discard(self, name: str) -> bool:
        """Remove a model from the set; return whether it was there."""
        with self._lock:
            found = self._models.pop(name, None)
            self._kept.pop(name, None)
            self.write()
            return found is not None

    def note_loaded(self, loaded: Iterable[ModelConfig]) -> None:
        """Record the models of the zygote, including those that jobs loaded on demand.

        Raises OSError.
        """
        with self._lock:
            on_demand = [model for model in loaded if model.name not in self._models]
            if on_demand == self._on_demand:
                return
            before, self._on_demand = self._on_demand, on_demand
            try:
                self.write()
            except OSError:
                self._on_demand = before  # so that the next call writes it
                raise

    def write(self) -> None:
        with self._lock:
            models = list(self._models.values())
            stored = _Stored(self._life, models, list(self._kept), self._on_demand)
            write_atomic(self._home.models, orjson.dumps(stored, option=orjson.OPT_INDENT_2))


def known_models(home: Home) -> dict[str, ModelConfig]:
    """The models by name that the daemon of a home keeps, or last kept, warm."""
    return {model.name: model for model in _read(home).models}


def on_demand_models(home: Home) -> dict[str, ModelConfig]:
    """The models by name that are warm because a job named their folder or hub id."""
    # Initial weights of jobs have internal names, such as JOB:init and JOB@STEP.
    models = _read(home).on_demand
    return {model.name: model for model in models if not {":", "@"} & set(model.name)}


def _read(home: Home) -> _Stored:
    """Read the file; a damaged one counts as empty."""
    try:
        return records.decode(home.models.read_bytes(), _Stored)
    except (FileNotFoundError, ValueError):
        return _Stored("", [])
