"""From a model's name in the config to a folder on this disk.

The zygote only ever maps local files. A hub id is downloaded once, in a process of its own: the
download's threads must not live where horses are forked.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .. import configs
from ..configs.config import ModelConfig
from ..jobs.adapters import base_of, cached, is_adapter, model_folder
from ..jobs.errors import NotFound

BUILTIN = "builtin:"

_fetched: set[str] = set()  # ids, by this process: for each job the hub's cache will do then


def local_folder(model: ModelConfig, *, is_newest: bool = False) -> Path:
    """Return the folder that holds a model, fetching it from the hub if need be. Raises NotFound.

    So is the base of an adapter. Progress of a download goes to stderr. `is_newest`: ask the hub
    also for what was fetched before, as there may be a newer one.
    """
    folder = _named_folder(model) or _from_hub(model.path, is_newest)
    base_id = _base_id(model, folder)
    base = None if base_id is None else _from_hub(base_id, is_newest)
    with _blaming(model, folder):
        has_config = ((base or model_folder(folder)) / "config.json").is_file()
    if not has_config:
        raise NotFound(
            f"model: {model.name}: {folder} must be a model folder with a config.json, "
            f"{'none there' if folder.is_dir() else 'no such folder'}"
        )
    return folder


def hub_id(model: ModelConfig) -> str | None:
    """Return what of a model is fetched from the hub, itself or its base; None: it is all here.

    Raises NotFound for an adapter's folder that says nothing of use.
    """
    folder = _named_folder(model)
    return model.path if folder is None else _base_id(model, folder)


def _named_folder(model: ModelConfig) -> Path | None:
    if model.path.startswith(BUILTIN):
        return Path(configs.__path__[0]) / model.path.removeprefix(BUILTIN)
    return Path(model.path) if Path(model.path).is_absolute() else None


def _base_id(model: ModelConfig, folder: Path) -> str | None:
    """The id of an adapter's base; None for a folder, and for a model that is no adapter."""
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


def _from_hub(named: str, is_newest: bool) -> Path:
    """Return the folder of an id, or id@revision, on the hub. Raises NotFound."""
    if named in _fetched and not is_newest:
        with suppress(LookupError):  # somebody has cleared the cache
            return cached(named)
    model_id, _, revision = named.partition("@")
    script = (
        "import sys, huggingface_hub as hub; "
        "print(hub.snapshot_download(sys.argv[1], revision=sys.argv[2] or None))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, model_id, revision],
        stdout=subprocess.PIPE,
        stderr=None,
        text=True,
    )
    if done.returncode != 0:
        raise NotFound(
            f"model: must be a warm model's name, a folder, or an id on a hub that can be reached, "
            f"got {named!r}; the reason is in the daemon's log"
        )
    _fetched.add(named)
    return Path(done.stdout.strip().splitlines()[-1])
