"""Writes an adapter as a complete model: the base's weights with the adapter merged in."""

from __future__ import annotations

from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from ...configs.config import ModelConfig
from ...jobs.files.atomic import fsync
from .reading import blaming, read


def write_merged(name: str, adapter: Path, folder: Path) -> int:
    """Write the merged model and its tokenizer to `folder`; return the bytes of its files.

    `name`: of the adapter, for messages. Raises JobFailed when it cannot be merged.
    """
    disable_progress_bar()  # its lines would stand between those of the command
    config = ModelConfig(name=name, path=str(adapter))
    with blaming(config, adapter):
        warm = read(config, adapter, may_pack=False)
    warm.model.save_pretrained(folder)
    warm.tokenizer.save_pretrained(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        fsync(path)
    fsync(folder)
    return sum(path.stat().st_size for path in files)
