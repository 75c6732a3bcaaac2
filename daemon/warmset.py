"""Which models ought to be warm: the configured ones, and what was loaded or unloaded since.

Kept in a file, so that a zygote or a supervisor that is replaced brings the same ones back, and
so that the shell can tell a warm model's name from a folder.
"""

from __future__ import annotations

from collections.abc import Iterable

import orjson

from ..configs.config import ModelConfig
from ..jobs.durable import write_atomic
from .home import Home


class WarmSet:
    """The wanted models of one daemon. `life` tells its lives apart: a new one starts afresh."""

    def __init__(self, home: Home, configured: Iterable[ModelConfig], life: str) -> None:
        self._home = home
        self._life = life
        self._models = {model.name: model for model in configured}
        stored_life, stored = _read(home)
        if stored_life == life:
            self._models = {model.name: model for model in stored}

    def models(self) -> list[ModelConfig]:
        return list(self._models.values())

    def add(self, model: ModelConfig) -> None:
        self._models[model.name] = model
        self.write()

    def discard(self, name: str) -> None:
        self._models.pop(name, None)
        self.write()

    def write(self) -> None:
        document = {"life": self._life, "models": [m.__dict__ for m in self._models.values()]}
        write_atomic(self._home.models, orjson.dumps(document, option=orjson.OPT_INDENT_2))


def known_models(home: Home) -> dict[str, ModelConfig]:
    """The models by name that the daemon of a home keeps, or last kept, warm."""
    _, models = _read(home)
    return {model.name: model for model in models}


def _read(home: Home) -> tuple[str, list[ModelConfig]]:
    """Whose life the file is of, and its models; a file that is not as we write it says nothing."""
    try:
        document = orjson.loads(home.models.read_bytes())
        models = [ModelConfig(**model) for model in document["models"]]
        return str(document["life"]), models
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return "", []
