"""Requirements of a job: cores, nodes and memory, and a daemon for decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...configs import gpus
from ...configs.config import DaemonConfig
from ...configs.labels import CORES
from ...configs.memory import memory_bytes, swap_bytes
from ...configs.precision import NATIVE
from ...configs.queues import TRAIN
from ...configs.units import format_size
from ...jobs.errors import SpecError, Unavailable
from ...jobs.spec import Spec
from ...jobs.training.options import TrainingSpec
from ..queue.nodes import NodeRegistry
from .connection import ClientConnection
from .estimating import size_of


def check_ranks(client: ClientConnection, every: Iterable[Mapping[str, Any]]) -> None:
    """Raise SpecError if no machine can run jobs with these options."""
    for options in every:
        _check_nodes(client, options.get("nodes", 1))
        _check_processes(client, options.get("processes", 1))


def _check_nodes(client: ClientConnection, nodes: int) -> None:
    """Refuse several nodes where only one machine can see the queue or the run directory."""
    if nodes == 1:
        return
    if not client.config.is_shared:
        problem = "without a Redis that several machines share (setting redis_url)"
    elif client.config.run_store is not None:
        problem = "with run directories in a bucket: several nodes need a shared folder (runs)"
    else:
        return
    raise SpecError("nodes", f"must be 1 {problem}, got {nodes}")


def _check_processes(client: ClientConnection, processes: int) -> None:
    """Refuse more processes than the cores of the machine that would run them.

    With a shared Redis the job may wait for a larger machine: it needs the label `cores`. Without a
    daemon that has reported its cores, the job finds out when it starts.
    """
    if processes == 1 or client.config.is_shared:
        return
    nodes = [node for node in NodeRegistry(client.connection).all() if TRAIN in node.queues]
    labels = [node.labels.get(CORES, "") for node in nodes]
    cores = [int(text) for text in labels if text.isascii() and text.isdigit()]
    if cores and processes > max(cores):
        most = max(cores)
        raise SpecError(
            "processes",
            f"must be {f'at most {most}' if most > 1 else '1'}, the cores of this machine, got "
            f"{processes}",
        )


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


def check_deciding_daemon(client: ClientConnection, what: str) -> None:
    """Raise Unavailable if no daemon runs in this home: with a shared Redis it may have none.

    The plan of `what` is in this home, so no other machine could decide how it continues.
    """
    if client.config.is_shared and not client.home.is_locked():
        raise Unavailable(
            f"{what}: the daemon of this home decides how it continues, and none runs in "
            f"{client.home.path}: start one, or submit on a machine that has one"
        )
