"""What the routes share: the way to the queue, the jobs under way, the threads for what blocks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar, cast

import redis.asyncio
from fastapi import Depends, Request

from ...configs.config import DaemonConfig
from ...jobs import spec_class
from ...jobs.errors import SpecError
from ...jobs.spec import Spec
from ..client import Client
from .audience import Audience
from .catalogue import Catalogue
from .errors import ApiError
from .filestore import FileStore
from .hub import Hub
from .intake import Intake
from .metrics import Metrics
from .pace import Pace

log = logging.getLogger(__name__)

T = TypeVar("T")

_THREADS = 16  # they wait for the disk and the server


class Gate:
    """One for the whole process."""

    def __init__(self, config: DaemonConfig, url: str) -> None:
        self.config = config
        self.client = Client(config)
        self.client.url = url
        self.redis = redis.asyncio.Redis.from_url(url)
        self.pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="http")
        self.hub = Hub(self.client)
        self.intake = Intake(self.client, self.blocking)
        self.catalogue = Catalogue(self.client)
        self.metrics = Metrics(self.client)
        self.files = FileStore(self.client.home)
        self.pace = Pace(config)
        self.audience = Audience()
        self.stopping = asyncio.Event()

    async def blocking(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call what waits for the disk or the server in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *arguments)

    async def waiting(self, queue: str) -> int:
        """Return how many jobs wait in a queue. Raises ApiError 429 when they are too many."""
        length: int = await cast(Any, self.redis.llen(self.client.store.queue(queue).key))
        if length >= self.config.http_queue_limit:
            eta = self.pace.eta_s(length)
            raise ApiError(
                429,
                f"{length} requests wait already: try again later",
                code="queue_full",
                headers={"retry-after": str(max(1, round(eta or 10)))},
            )
        return length

    def parse(self, kind: str, values: dict[str, Any]) -> Spec:
        """Check the options of a job, on top of the configured defaults. Raises SpecError."""
        return spec_class(kind).parse({**self.config.defaults.get(kind, {}), **values})

    def stop(self) -> None:
        """End every wait for a job with an error; the jobs stay in the queue."""
        self.stopping.set()
        self.hub.stop()

    async def close(self) -> None:
        await self.hub.close()
        await self.redis.aclose()
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.client.close()


async def _gate(request: Request) -> Gate:  # async: or it would be called in a thread
    gate: Gate = request.app.state.gate
    return gate


GateDep = Annotated[Gate, Depends(_gate)]


def as_param(error: SpecError, names: dict[str, str]) -> SpecError:
    """Return a spec's error with the request's own name for the field."""
    problem = str(error).partition(": ")[2]
    return SpecError(names.get(error.field, error.field), problem)
