"""What the routes share: the way to the queue, the jobs under way, the threads for what blocks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, TypeVar, cast

import redis.asyncio
from fastapi import Depends, Request

from ....configs.config import DaemonConfig
from ....configs.queues import TRAIN
from ....jobs import spec_class
from ....jobs.errors import SpecError, WarmdError
from ....jobs.spec import Spec
from ...client.client import Client
from ...host.image_store import ImageStore
from ..http.errors import ApiError
from .eta import Pace, next_training_s
from .event_reader import Hub
from .file_store import FileStore
from .metrics import Metrics
from .models_index import Catalogue
from .submitter import Intake
from .waiters import Audience

log = logging.getLogger(__name__)

T = TypeVar("T")

_CONNECTIONS = 16  # to the server
_THREADS = 16  # they wait for the disk and the server
_SOON_S = 10.0  # where no answer says how long the next one takes
_ASKING = 2  # threads that ask the daemon, which may not answer for seconds


class Gate:
    """One for the whole process."""

    def __init__(self, config: DaemonConfig, url: str) -> None:
        self.config = config
        self.client = Client(config)
        self.client.url = url
        # Hundreds of requests at once wait for a connection; by default, they would be refused one.
        pool = redis.asyncio.BlockingConnectionPool.from_url(url, max_connections=_CONNECTIONS)
        self.redis = redis.asyncio.Redis.from_pool(pool)
        self.pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="http")
        # One, as two would only take turns: what it does needs the interpreter.
        self._bodies = ThreadPoolExecutor(1, thread_name_prefix="bodies")
        self._asking = ThreadPoolExecutor(_ASKING, thread_name_prefix="asking")
        self.hub = Hub(self.client)
        self.intake = Intake(self.client, self.blocking)
        self.catalogue = Catalogue(self.client)
        self.metrics = Metrics(self.client)
        self.files = FileStore(
            self.client.home, most_bytes=config.max_uploads_bytes, keep_s=config.keep_uploads_s
        )
        self.images = ImageStore(self.client.home.runs)
        self.pace = Pace(config)
        self.stopping = asyncio.Event()
        self.audience = Audience(partial(self.blocking, self.client.cancel), self.stopping)

    async def blocking(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call what waits for the disk or the server in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *arguments)

    async def taking_apart(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call what computes on a request's body in a thread, one after the other."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._bodies, _or_refusal, work, *arguments)
        if isinstance(found, ApiError | WarmdError):
            raise found
        return found

    async def asking(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call what asks the daemon in a thread of its own: /health waits behind no request."""
        return await asyncio.get_running_loop().run_in_executor(self._asking, work, *arguments)

    async def waiting(self, queue: str) -> int:
        """Return how many jobs wait in a queue. Raises ApiError 429 when they are too many."""
        length: int = await cast(Any, self.redis.llen(self.client.store.queue(queue).key))
        if length >= self.config.http_queue_limit:
            if queue == TRAIN:
                eta = await self.blocking(next_training_s, self.client)
            else:
                eta = self.pace.eta_s(length) or _SOON_S
            raise ApiError(
                429,
                f"{length} jobs wait already in the queue {queue}: try again later",
                code="queue_full",
                headers={"retry-after": str(max(1, round(eta)))},
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
        for pool in (self.pool, self._bodies, self._asking):
            pool.shutdown(wait=False, cancel_futures=True)
        self.client.close()


def _or_refusal(work: Callable[..., T], *arguments: Any) -> T | ApiError | WarmdError:
    """Return what `work` raises without what it was at: that is the body, and it may be large."""
    try:
        return work(*arguments)
    except (ApiError, WarmdError) as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)


async def _gate(request: Request) -> Gate:  # async: or it would be called in a thread
    gate: Gate = request.app.state.gate
    return gate


GateDep = Annotated[Gate, Depends(_gate)]


def as_param(error: SpecError, names: dict[str, str]) -> SpecError:
    """Return a spec's error with the request's own name for the field."""
    problem = str(error).partition(": ")[2]
    return SpecError(names.get(error.field, error.field), problem)
