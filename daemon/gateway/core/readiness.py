"""Whether a worker can take requests."""

from __future__ import annotations

from ....configs.config import DaemonConfig
from ....configs.queues import INFER
from ....jobs.errors import Unavailable
from ...client import control
from ...client.client import Client

_TIMEOUT_S = 5.0  # for the daemon's reply: the wait holds one of few threads


def unready_reason(config: DaemonConfig, client: Client) -> str | None:
    """Return why no worker can take requests now, or None. Asks the daemon, or Redis for nodes."""
    try:
        return _reason(config, client)
    except Unavailable as error:
        return str(error)


def _reason(config: DaemonConfig, client: Client) -> str | None:
    if not config.workers:
        return None if client.nodes.serving(INFER) else "no node takes jobs of the queue infer"
    if not any(worker.queue == INFER for worker in config.workers):
        return "the daemon has no worker for the queue infer"
    ready = control.ready(config, timeout_s=_TIMEOUT_S)
    if not ready["zygote"]:
        return "libraries and models are loading"
    if INFER not in ready["queues"]:
        return "the workers of the queue infer are starting"
    return None
