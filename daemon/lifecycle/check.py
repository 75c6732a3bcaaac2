"""Whether a machine can run a job: cores and nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...configs.config import DaemonConfig
from ...configs.labels import CORES
from ...configs.queues import TRAIN
from ...jobs.errors import SpecError
from ..queue.nodes import NodeRegistry
from .places import Places


def check_ranks(places: Places, config: DaemonConfig, every: Iterable[Mapping[str, Any]]) -> None:
    """Raise SpecError if no machine can run jobs with these options."""
    for options in every:
        _check_nodes(config, options.get("nodes", 1))
        _check_processes(places, config, options.get("processes", 1))


def _check_nodes(config: DaemonConfig, nodes: int) -> None:
    """Refuse several nodes where only one machine can see the queue or the run directory."""
    if nodes == 1:
        return
    if not config.is_shared:
        problem = "without a Redis that several machines share (setting redis_url)"
    elif config.run_store is not None:
        problem = "with run directories in a bucket: several nodes need a shared folder (runs)"
    else:
        return
    raise SpecError("nodes", f"must be 1 {problem}, got {nodes}")


def _check_processes(places: Places, config: DaemonConfig, processes: int) -> None:
    """Refuse more processes than the cores of the machine that would run them.

    With a shared Redis the job may wait for a larger machine: it needs the label `cores`. Without a
    daemon that has reported its cores, the job finds out when it starts.
    """
    if processes == 1 or config.is_shared:
        return
    nodes = [node for node in NodeRegistry(places.connection).all() if TRAIN in node.queues]
    labels = [node.labels.get(CORES, "") for node in nodes]
    cores = [int(text) for text in labels if text.isascii() and text.isdigit()]
    if cores and processes > max(cores):
        most = max(cores)
        raise SpecError(
            "processes",
            f"must be {f'at most {most}' if most > 1 else '1'}, the cores of this machine, got "
            f"{processes}",
        )
