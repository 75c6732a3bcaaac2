"""Metrics of disk and memory: of the machine of this gateway, and of Redis."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ....configs.memory import available_bytes, memory_bytes
from ...client.client import Client


class MachineMetrics(Collector):
    """The disk space and memory of a machine."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def collect(self) -> Iterable[Metric]:
        yield from self._disk()
        yield GaugeMetricFamily(
            "warmd_memory_size_bytes",
            "Memory that the machine or container of the gateway may use.",
            value=memory_bytes(),
        )
        yield GaugeMetricFamily(
            "warmd_memory_available_bytes",
            "Part of it that can still be allocated without swapping.",
            value=available_bytes(),
        )
        yield from self._redis()

    def describe(self) -> Iterable[Metric]:
        return []  # otherwise registering would read Redis

    def _disk(self) -> Iterable[Metric]:
        """The home is on a machine's own disk, the run directories may be on a shared one."""
        free = GaugeMetricFamily(
            "warmd_disk_free_bytes", "Free space for a folder of the home.", labels=["folder"]
        )
        used = GaugeMetricFamily(
            "warmd_disk_used_bytes", "Used space on the disk of that folder.", labels=["folder"]
        )
        home = self._client.home
        for folder, path in (("home", home.path), ("runs", home.runs)):
            with suppress(OSError):  # a network disk that is unreachable
                disk = shutil.disk_usage(path)
                free.add_metric([folder], disk.free)
                used.add_metric([folder], disk.used)
        return [free, used]

    def _redis(self) -> Iterable[Metric]:
        info: Any = self._client.connection.info("memory")
        used = GaugeMetricFamily("warmd_redis_memory_used_bytes", "Memory that Redis uses.")
        used.add_metric([], info["used_memory"])
        limit = GaugeMetricFamily(
            "warmd_redis_memory_limit_bytes", "Redis' maxmemory, 0 for no limit."
        )
        limit.add_metric([], info.get("maxmemory", 0))
        return [used, limit]
