"""Application state that the routes share: Redis, event reader, submitter, waiters, threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, Request

from ....configs.config import DaemonConfig
from ....configs.queues import TRAIN
from ....jobs import spec_class
from ....jobs.errors import SpecError, WarmdError
from ....jobs.spec import Spec
from ...client.client import Client
from ...host.image_store import ImageStore
from ...queue.clients import async_client
from ..http.client import current
from ..http.errors import ApiError
from ..http.open_requests import OpenRequests
from ..http.tokens import Tokens
from .agents import AgentRequests
from .eta import StartEstimator, next_training_s
from .event_reader import EventReader
from .file_store import FileStore
from .inbox import Pace
from .metrics import Metrics
from .models_index import ModelIndex
from .overview import Overview
from .queue_shares import QueueShares
from .readiness import unready_reason
from .run_metrics import RunMetrics
from .shared import Shared
from .submitter import Submitter
from .threads import Threads
from .waiters import Waiters

log = logging.getLogger(__name__)

T = TypeVar("T")

_CONNECTIONS = 16  # to Redis
_THREADS = 16  # for disk and Redis
_DEFAULT_ETA_S = 10.0  # until a request has been measured
_CONTROL_THREADS = 2  # for requests to the daemon, whose reply may take seconds
# Which check completions and queue jobs: in Python, so that more would only delay the event loop.
_COMPLETION_THREADS = 3
_CHECK_THREADS = 4  # for checks of data and schemas, which may take seconds
_MODEL_THREADS = 2  # for loading models, which may take minutes


class AppState:
    """The state of one gateway process."""

    def __init__(
        self, config: DaemonConfig, url: str, tokens: Tokens, requests: OpenRequests
    ) -> None:
        self.config = config
        self.tokens = tokens
        self.requests = requests
        self.client = Client(config)
        self.client.url = url
        # It waits for a connection: by default, hundreds of simultaneous requests raise an error.
        self.redis = async_client(url, max_connections=_CONNECTIONS)
        self._threads = Threads(_THREADS, "http")
        self._completions = Threads(_COMPLETION_THREADS, "completions")
        # One thread each: parsing holds the GIL, so a second one would not help.
        self._parser = Threads(1, "bodies")
        self._pages = Threads(1, "pages")  # for the events that pages lack
        self._control_pool = ThreadPoolExecutor(
            _CONTROL_THREADS, thread_name_prefix="in_control_thread"
        )
        self._schemas = Threads(_CHECK_THREADS, "schemas")
        self._data = Threads(_CHECK_THREADS, "data")
        self._model_pool = ThreadPoolExecutor(_MODEL_THREADS, thread_name_prefix="models")
        pace = Pace()
        self.event_reader = EventReader(self.client, self.in_thread, self._pages.run, pace)
        # One token tells no clients apart.
        self._queue_shares = None if config.http_tokens is None else QueueShares()
        self.submitter = Submitter(
            self.client,
            {
                None: self.in_thread,
                "completion": self._completions.run,
                "schema": self.in_schema_thread,
                "data": self.in_data_thread,
            },
            self._queue_shares,
        )
        self.model_index = ModelIndex(self.client)
        self.metrics = Metrics(self.client)
        self.run_metrics = RunMetrics()
        self.files = FileStore(
            self.client.home, max_bytes=config.max_uploads_bytes, keep_s=config.keep_uploads_s
        )
        self.files.clean()
        has_folder = self.client.remote is None
        self.images = ImageStore(self.client.home.runs) if has_folder else None
        self.eta = StartEstimator(config)
        self.overview = Overview(self.client, self.in_thread, self.in_control_thread, pace)
        self.unready_reason = Shared(
            partial(self.in_control_thread, unready_reason, config, self.client)
        )
        self.stopping = asyncio.Event()
        self.agents = AgentRequests()
        self.waiters = Waiters(partial(self.in_thread, self.client.jobs.cancel), self.stopping)

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call a function that blocks on disk or Redis in a thread."""
        return await self._threads.run(work, *arguments)

    async def in_parser_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call a function that computes on a request body in the parser thread, one at a time."""
        found: Any = await self._parser.run(_or_refusal, work, *arguments)
        if isinstance(found, ApiError | WarmdError):
            raise found
        return cast(T, found)

    async def in_control_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call a function that queries the daemon; separate threads, so /health never queues."""
        return await asyncio.get_running_loop().run_in_executor(
            self._control_pool, work, *arguments
        )

    async def in_schema_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call a function that checks the JSON Schema of a job."""
        return await self._schemas.run(work, *arguments)

    async def in_data_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call a function that reads the data of jobs, which may take minutes."""
        return await self._data.run(work, *arguments)

    async def in_model_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call a function that loads or unloads a model."""
        return await asyncio.get_running_loop().run_in_executor(self._model_pool, work, *arguments)

    async def queue_length(self, queue: str) -> int:
        """Return how many jobs wait in a queue.

        Raises ApiError 429 beyond the limit; where several tokens are set, only for a client that
        has its share of the places.
        """
        length: int = await cast(Any, self.redis.llen(self.client.store.queue(queue).key))
        if length >= self.config.http_queue_limit and not await self._has_share(queue):
            if queue == TRAIN:
                eta = await self.in_thread(next_training_s, self.client)
            else:
                eta = self.eta.start_in_s(length) or _DEFAULT_ETA_S
            raise ApiError(
                429,
                f"the queue {queue} is full ({length} waiting jobs): try again later",
                code="queue_full",
                headers={"retry-after": str(max(1, round(eta)))},
            )
        return length

    async def _has_share(self, queue: str) -> bool:
        """Whether the client of this request holds less than its fair share of a full queue."""
        client = current()
        if self._queue_shares is None or client is None:
            return False
        waiting = await self.in_thread(self.client.store.order, queue)
        return self._queue_shares.has_room(waiting, client.share, self.config.http_queue_limit)

    def parse(self, kind: str, values: dict[str, Any]) -> Spec:
        """Check the options of a job together with the configured defaults. Raises SpecError."""
        return spec_class(kind).parse({**self.config.defaults.get(kind, {}), **values})

    def stop(self) -> None:
        """End every wait for a job with an error. The jobs stay in the queue."""
        self.stopping.set()
        self.event_reader.stop()
        self.overview.stop()

    async def close(self) -> None:
        await self.event_reader.close()
        await self.redis.aclose()
        for threads in (
            self._threads,
            self._completions,
            self._parser,
            self._pages,
            self._schemas,
            self._data,
        ):
            threads.shutdown()
        for pool in (self._control_pool, self._model_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self.client.close()


def _or_refusal(work: Callable[..., T], *arguments: Any) -> T | ApiError | WarmdError:
    """Return a raised ApiError or WarmdError without its traceback, which would hold the body."""
    try:
        return work(*arguments)
    except (ApiError, WarmdError) as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)


async def _app_state(request: Request) -> AppState:  # async: FastAPI calls `def` in a thread
    state: AppState = request.app.state.warmd
    return state


StateDep = Annotated[AppState, Depends(_app_state)]


def as_param(error: SpecError, names: dict[str, str]) -> SpecError:
    """Return a SpecError that names the field as the request does."""
    return SpecError(names.get(error.field, error.field), error.problem)
