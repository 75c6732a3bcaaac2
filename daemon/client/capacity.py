"""Requirements of a job: memory, and a daemon for decisions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...configs import gpus
from ...configs.config import DaemonConfig, ModelConfig
from ...configs.memory import memory_bytes, swap_bytes
from ...configs.precision import NATIVE
from ...configs.units import format_size
from ...jobs.errors import SpecError, Unavailable
from ...jobs.models.adapters import model_folder
from ...jobs.models.folder_checks import read_config
from ...jobs.models.weight_headers import count_parameters
from ...jobs.spec import Spec
from ...jobs.training.options import TrainingSpec
from ..host import fetch
from .connection import Connection

if TYPE_CHECKING:
    from ...jobs.bench.floor import ModelSize


def check_memory(config: DaemonConfig, spec: Spec, document: Mapping[str, Any]) -> None:
    """Refuse a training whose weights, gradients and moments are more than all memory and swap.

    `document`: that of the checked job. With a shared Redis the job may run on a larger machine. A
    job on a GPU compares with the memory of its GPU when it starts.
    """
    if not isinstance(spec, TrainingSpec) or config.is_shared or gpus.visible():
        return
    if getattr(spec, "base_precision", NATIVE) != NATIVE:  # frozen weights are smaller
        return
    size = size_of(spec, document)
    if size is None or size.state_bytes <= memory_bytes():
        return
    most = memory_bytes() + swap_bytes()
    if size.state_bytes <= most:
        return
    smaller = "a smaller model" + ("" if spec.lora is not None else ", or an adapter (lora)")
    raise SpecError(
        "model",
        f"must fit the memory of this machine ({format_size(most)}), got one that needs at least "
        f"{format_size(size.state_bytes)} to be trained: train {smaller}",
    )


def size_of(spec: TrainingSpec, document: Mapping[str, Any]) -> ModelSize | None:
    """The sizes of the model that a checked job trains, as far as its files show them."""
    # Imported here: it has the options of every kind, which commands that read do not need.
    from ...jobs.bench.floor import ModelSize
    from ...jobs.mlm.options import MlmSpec

    if document.get("model") is None:
        return ModelSize.of_new(spec) if isinstance(spec, MlmSpec) else None
    folder = folder_of(document)
    if folder is None:  # it has still to be downloaded
        return None
    weights = model_folder(folder)
    parameters = count_parameters(weights)
    try:
        config = read_config(weights / "config.json")
    except (OSError, ValueError):
        return None
    if parameters is None:
        return None
    return ModelSize.of(config, parameters, lora=spec.lora)


def folder_of(document: Mapping[str, Any]) -> Path | None:
    """The folder of the model of a checked job; None: it has still to be downloaded."""
    return fetch.folder_at_hand(ModelConfig(**document["model"]))


def check_deciding_daemon(client: Connection, what: str) -> None:
    """Raise Unavailable if no daemon runs in this home: with a shared Redis it may have none.

    The plan of `what` is in this home, so no other machine could decide how it continues.
    """
    if client.config.is_shared and not client.home.is_locked():
        raise Unavailable(
            f"{what}: the daemon of this home decides how it continues, and none runs in "
            f"{client.home.path}: start one, or submit on a machine that has one"
        )
