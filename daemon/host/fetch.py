"""From a model's name in the config to a folder on this disk.

The zygote only ever maps local files. Models on a hub are downloaded once, by `downloads`; a model
that is complete on this disk needs neither a process nor a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ... import configs
from ...configs.config import ModelConfig
from ...jobs.errors import NotFound
from ...jobs.models.adapters import base_of, cached, is_adapter, model_folder

BUILTIN = "builtin:"


class NoModelFolder(NotFound):
    """The folder of a model is not on this machine, or is not a model folder."""


def local_folder(model: ModelConfig) -> Path:
    """Return the folder that holds a model. Raises NotFound, also if it is only on a hub."""
    folder = folder_at_hand(model)
    if folder is None:
        raise NotFound(f"model: {model.name}: {hub_id(model)} is not in the hub's cache")
    return folder


def folder_at_hand(model: ModelConfig) -> Path | None:
    """The folder that holds a model; None while a part of it, or its base, is on a hub only.

    Raises NoModelFolder for a folder that holds no model, and NotFound for a damaged one.
    """
    folder = _named_folder(model) or _cached(model.path)
    if folder is None:
        return None
    base_id = _base_id(model, folder)
    base = None if base_id is None else _cached(base_id)
    if base_id is not None and base is None:
        return None
    with _blaming(model, folder):
        has_config = ((base or model_folder(folder)) / "config.json").is_file()
    if not has_config:
        raise NoModelFolder(
            f"model: {model.name}: must be a model folder with a config.json, got {folder}: "
            f"{'it has none' if folder.is_dir() else 'no such folder'}"
        )
    return folder


def _cached(named: str) -> Path | None:
    """The folder of an id, or id@revision, in the hub's cache; None if it is incomplete."""
    try:
        return cached(named)
    except LookupError:
        return None


def hub_id(model: ModelConfig) -> str | None:
    """Return the part of a model that is on a hub: itself or its base; None: all is in folders.

    Raises NotFound for an adapter's folder without usable information.
    """
    folder = _named_folder(model)
    return model.path if folder is None else _base_id(model, folder)


def next_id(model: ModelConfig, fetched: set[str]) -> str | None:
    """Return the next part of a model to fetch that is not `fetched` yet; None: no more.

    The base of an adapter is known only when the adapter is on this machine.
    """
    named = hub_id(model)
    if named in fetched and (folder := _cached(model.path)) is not None:
        named = _base_id(model, folder)
    return None if named in fetched else named


def _named_folder(model: ModelConfig) -> Path | None:
    if model.path.startswith(BUILTIN):
        return Path(configs.__path__[0]) / model.path.removeprefix(BUILTIN)
    return Path(model.path) if Path(model.path).is_absolute() else None


def _base_id(model: ModelConfig, folder: Path) -> str | None:
    """The id of an adapter's base; None for a folder, and for a model that is not an adapter."""
    if not is_adapter(folder):
        return None
    with _blaming(model, folder):
        base = base_of(folder)
    return None if Path(base).is_absolute() else base


@contextmanager
def _blaming(model: ModelConfig, folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise NotFound(f"model: {model.name}: {folder}: {error}") from error
