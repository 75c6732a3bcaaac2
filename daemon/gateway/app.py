"""The FastAPI application: routes, middleware, lifetime."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ... import __version__
from ...configs.config import DaemonConfig
from ..host.home import Home
from .api import (
    chat,
    completions,
    curricula,
    embeddings,
    evaluations,
    file_records,
    files,
    fine_tuning,
    graders,
    health,
    job_events,
    jobs,
    kinds,
    login,
    models,
    overview,
    permissions,
    rerank,
    responses,
    runs,
    sweeps,
    tokenizing,
    warm_models,
)
from .core.metrics import Metrics
from .core.state import AppState
from .http import errors
from .http.auth import AuthMiddleware, end_unauthorized
from .http.browser import BrowserMiddleware
from .http.encoded_slashes import EncodedSlashes
from .http.hidden import hide
from .http.open_requests import OpenRequests
from .http.rights import RouteRights
from .http.tickets import Tickets
from .http.tokens import Tokens
from .page import routes as page

log = logging.getLogger(__name__)

_ROUTERS = (
    chat.router,
    completions.router,
    responses.router,
    embeddings.router,
    rerank.router,
    tokenizing.router,
    models.router,
    fine_tuning.router,
    graders.router,
    permissions.router,
    files.router,
    file_records.router,
    health.router,
    overview.router,
    jobs.router,
    runs.router,
    sweeps.router,
    curricula.router,
    job_events.router,
    evaluations.router,
    kinds.router,
    warm_models.router,
    login.router,
    page.router,
)


def create_app(config: DaemonConfig, url: str) -> FastAPI:
    """Create the application of one daemon whose jobs are in the Redis at `url`."""

    tokens, requests = Tokens(config), OpenRequests()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.warmd = state = AppState(config, url, tokens, requests)
        watching = partial(end_unauthorized, tokens, requests)
        tasks = {asyncio.create_task(state.event_reader.run())}
        if config.http_tokens is not None:
            tasks.add(asyncio.create_task(tokens.watch(watching)))
        for task in tasks:
            task.add_done_callback(exit_unless_canceled)
        yield
        while tasks:
            for task in tasks:
                task.cancel()  # repeated: redis-py sometimes swallows a cancellation
            _, tasks = await asyncio.wait(tasks, timeout=0.1)
        await state.close()

    app = FastAPI(
        title="warmd",
        version=__version__,
        description="Warm models and training jobs, by OpenAI's API.",
        docs_url=None,  # these pages load scripts from a CDN
        redoc_url=None,
        lifespan=lifespan,
    )
    for router in _ROUTERS:
        app.include_router(router)
    folder = {} if config.runs_folder is None else {config.runs_folder: "RUNS"}
    hide({config.home: "HOME", **folder})
    errors.install(app)
    app.state.tickets = tickets = Tickets()
    served = [*app.routes, *(route for router in _ROUTERS for route in router.routes)]
    # The last one added is the outermost.
    app.add_middleware(
        AuthMiddleware,
        tokens=tokens,
        requests=requests,
        needs=RouteRights(route for route in served if isinstance(route, Route)),
        page=config.http_page,
        tickets=tickets,
        sockets=Home(config.home).sockets,
    )
    app.add_middleware(
        BrowserMiddleware,
        host=config.http_host,
        origins=config.http_origin,
        has_token=tokens.are_set,
    )
    app.add_middleware(_Counted, state=app.state)
    app.add_middleware(EncodedSlashes)
    return app


def exit_unless_canceled(task: asyncio.Task[None]) -> None:
    """End the process when one of its own tasks ends; the supervisor starts a new one.

    Without the event reader every request would wait forever while /health reported success, and
    without the task that watches the tokens nobody could be shut out.
    """
    if not task.cancelled():
        log.critical("http: a task of the gateway has ended", exc_info=task.exception())
        os._exit(1)


class _Counted:
    """Counts requests by route and status."""

    def __init__(self, app: ASGIApp, *, state: Any) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 499

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, note_status)
        finally:
            # Unknown paths share one label: each label is kept, and clients can invent any number.
            route = getattr(scope.get("route"), "path", "other")
            metrics: Metrics = self.state.warmd.metrics
            metrics.count_request(route, status, time.perf_counter() - begun)
