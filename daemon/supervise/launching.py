"""Starts zygotes and workers with their settings: models, memory, queue, labels of the machine."""

from __future__ import annotations

import logging
import secrets
import selectors
from collections.abc import Callable

from ...configs.config import DaemonConfig, WorkerConfig
from ...configs.memory import memory_bytes
from ...jobs.errors import WarmdError
from ..host import downloads
from ..host.home import Home
from ..host.messages import (
    BootProgress,
    HorsePlan,
    LocalModel,
    Message,
    WantedModel,
    WorkerSettings,
    ZygoteSettings,
)
from ..host.warm_set import WarmSet
from ..queue.keys import LEASE_S
from .children import Child, WorkerChild

log = logging.getLogger(__name__)

_DEFAULT_BUDGET = 0.7  # of the machine's memory

OnMessage = Callable[[Message], None]


class Launcher:
    """Starts the processes that run jobs, with the settings of one daemon."""

    def __init__(
        self, config: DaemonConfig, home: Home, url: str, selector: selectors.BaseSelector
    ) -> None:
        self._config = config
        self._home = home
        self._url = url
        self._selector = selector

    def start_zygote(
        self, child: Child, models: list[WantedModel], on_message: OnMessage, *, is_next: bool
    ) -> None:
        """Start a zygote. `is_next`: it takes the socket of the running one when it is ready."""
        budget = self._config.memory_budget_bytes or int(memory_bytes() * _DEFAULT_BUDGET)
        settings = ZygoteSettings(budget, models, _standbys(self._config.workers), is_next)
        child.start(
            self._selector, "warmd.daemon.fork.zygote", self._home, settings, on_message=on_message
        )

    def start_worker(
        self,
        worker: WorkerChild,
        labels: dict[str, str],
        max_jobs: int | None,
        on_message: OnMessage,
    ) -> None:
        """Start a worker, with a new name in Redis.

        `labels`: of this node. `max_jobs`: after which it ends; None: no limit.
        """
        worker.redis_name = f"{worker.name}:{self._home.key}:{secrets.token_hex(3)}"
        settings = WorkerSettings(
            config=worker.config,
            url=self._url,
            name=worker.redis_name,
            # The embedded Redis has only this daemon's workers, whose deaths it notices.
            is_shared=self._config.is_shared,
            lease_s=LEASE_S,
            labels=labels,
            max_jobs=max_jobs,
            gang_wait_s=self._config.gang_wait_s,
            runs=self._config.run_store,
        )
        worker.start(
            self._selector, "warmd.daemon.work.worker", self._home, settings, on_message=on_message
        )


def download_models(
    warm_set: WarmSet,
    *,
    must_have: bool,
    is_canceled: Callable[[], bool],
    report: Callable[[BootProgress], None],
) -> list[WantedModel]:
    """Return the warm models with their folders, downloaded where that is needed.

    A model that cannot be downloaded is left out, logged and reported; with `must_have`, the
    WarmdError of a model in the settings is raised. `is_canceled` is polled during downloads, which
    may take hours; the list is incomplete if it has become true.
    """
    models = []
    for model in warm_set.models():
        is_required = warm_set.is_required(model.name)
        try:
            folder = downloads.ensure_folder(model, is_canceled=is_canceled)
            models.append(WantedModel(LocalModel(model, str(folder)), is_required))
        except WarmdError as error:
            if is_canceled():
                return models
            if is_required and must_have:
                raise
            log.error("zygote: %s", error)
            report(BootProgress("model", True, name=model.name, problem=str(error)))
    return models


def _standbys(workers: tuple[WorkerConfig, ...]) -> list[HorsePlan]:
    """The horses that a zygote forks before there is a job for them."""
    return [
        HorsePlan(worker.device, worker.gpu_memory, worker.niceness)
        for worker in workers
        if worker.standby
    ]
