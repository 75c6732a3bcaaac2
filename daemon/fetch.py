"""From a model's name in the config to a folder on this disk.

The zygote only ever maps local files. A hub id is downloaded once, in a process of its own: the
download's threads must not live where horses are forked.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .. import configs
from ..configs.config import ModelConfig
from ..jobs.adapters import model_folder
from ..jobs.errors import NotFound

BUILTIN = "builtin:"


def local_folder(model: ModelConfig) -> Path:
    """Return the folder that holds a model, fetching it from the hub if need be. Raises NotFound.

    Progress of a download goes to stderr.
    """
    if model.path.startswith(BUILTIN):
        folder = Path(configs.__path__[0]) / model.path.removeprefix(BUILTIN)
    elif Path(model.path).is_absolute():
        folder = Path(model.path)
    else:
        folder = _from_hub(model.path)
    try:
        config = model_folder(folder) / "config.json"
    except ValueError as error:
        raise NotFound(f"model: {model.name}: {folder}: {error}") from error
    if not config.is_file():
        raise NotFound(
            f"model: {model.name}: {folder} must be a model folder with a config.json, "
            f"{'none there' if folder.is_dir() else 'no such folder'}"
        )
    return folder


def _from_hub(model_id: str) -> Path:
    script = "import sys, huggingface_hub as hub; print(hub.snapshot_download(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", script, model_id], stdout=subprocess.PIPE, stderr=None, text=True
    )
    if done.returncode != 0:
        raise NotFound(
            f"model: must be a warm model's name, a folder, or an id on a hub that can be reached, "
            f"got {model_id!r}; the reason is in the daemon's log"
        )
    return Path(done.stdout.strip().splitlines()[-1])
