"""Replies to requests on the control socket: stop, reload, load, unload, models, status."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict
from typing import Any

import redis

from ... import __version__
from ...configs.config import redacted_url
from ...configs.queues import QUEUES
from ...jobs.errors import Conflict, NotFound, Unavailable
from ...jobs.files.shortage import Lacking, shortage
from ..host import downloads, memory
from ..host.channel import Channel
from ..host.messages import (
    Failure,
    GetReady,
    GetReload,
    GetStatus,
    ListModels,
    LoadFolder,
    LoadModel,
    LocalModel,
    Message,
    Models,
    Notified,
    Ready,
    Reload,
    ReloadStatus,
    RunningJob,
    StartCommands,
    Status,
    Stop,
    Stopping,
    TestNotification,
    Unloaded,
    UnloadModel,
    ZygoteStatus,
)
from ..notify.delivery import deliver, sample
from ..queue import listing
from .children import WorkerChild
from .supervisor import Supervisor

_STATUS_TIMEOUT_S = 1.0  # for the zygote's status; it does not reply while it loads a model
_LOAD_TIMEOUT_S = 600.0


def handle(supervisor: Supervisor, request: Message) -> Message:
    """Handle one request; return the reply. Raises WarmdError."""
    match request:
        case Stop():
            running: list[RunningJob] = []  # the daemon stops even if Redis is unreachable
            with contextlib.suppress(redis.RedisError):
                if not supervisor.is_redis_down:
                    running = _running(supervisor)
            supervisor.stop("now" if request.now else "drain")
            return Stopping(running)
        case Reload():
            upgrades = supervisor.upgrades.changes()  # before it begins
            supervisor.reload()
            return ReloadStatus("requested", "", None, [], [], upgrades)
        case GetReload():
            return _reload_status(supervisor)
        case StartCommands():
            supervisor.start_commands()
            return request
        case LoadModel() | UnloadModel() if supervisor.reloading.is_starting:
            raise Conflict("the daemon reloads: try again when `warmd reload` is done")
        case LoadModel():
            folder = downloads.ensure_folder(
                request.model, refresh=True, is_canceled=lambda: supervisor.stopping is not None
            )
            loaded = _request_zygote(supervisor, LoadFolder(LocalModel(request.model, str(folder))))
            supervisor.warm_set.add(request.model, is_kept=request.is_kept)
            return loaded
        case UnloadModel():
            return _unload(supervisor, request)
        case ListModels():
            return Models(_zygote_status(supervisor, timeout_s=_LOAD_TIMEOUT_S).models)
        case GetStatus():
            try:
                return Status(_status(supervisor))
            except redis.RedisError as error:
                full = supervisor.home.full_folder_of_redis()
                if full is None:
                    raise
                raise Unavailable(
                    f"the disk of {full} is full, and Redis waits for space: free some space"
                ) from error
        case TestNotification():
            if (target := supervisor.config.notify) is None:
                raise NotFound("notify: not set when the daemon started: `warmd stop` and `start`")
            return Notified(deliver(target, sample()))
        case GetReady():
            # Polled every few seconds, so it asks no other process, which may be busy.
            workers = [worker for worker in supervisor.workers if worker.is_ready]
            queues = sorted({worker.config.queue for worker in workers})
            takes_jobs = supervisor.is_warm and supervisor.node.leaving is None
            takes_jobs = takes_jobs and supervisor.stopping is None
            takes_jobs = takes_jobs and not supervisor.is_redis_down
            silent_s = time.monotonic() - supervisor.looped_at
            return Ready(supervisor.zygote.is_ready, queues, takes_jobs, silent_s)
        case unknown:
            raise LookupError(unknown.op)


def _zygote_status(supervisor: Supervisor, *, timeout_s: float) -> ZygoteStatus:
    reply = _request_zygote(supervisor, GetStatus(), timeout_s=timeout_s)
    assert isinstance(reply, ZygoteStatus)
    return reply


def _request_zygote(
    supervisor: Supervisor, request: Message, *, timeout_s: float = _LOAD_TIMEOUT_S
) -> Message:
    """Send a request to the zygote and return its reply.

    Raises the zygote's own WarmdError, or Unavailable.
    """
    try:
        channel = Channel.connect(supervisor.home.zygote_socket, timeout_s=timeout_s)
        with contextlib.closing(channel):
            channel.send(request)
            reply = next(iter(channel), None)
    except OSError as error:
        if (lacking := shortage(error)) is not None:
            raise Lacking(lacking) from error
        raise Unavailable("the zygote is starting: try again in a few seconds") from error
    if reply is None:
        raise Unavailable("the zygote died before it replied: see `warmd logs`")
    if isinstance(reply, Failure):
        raise reply.to_exception()
    return reply


def _unload(supervisor: Supervisor, request: UnloadModel) -> Message:
    """Unload a model, or forget one that is to be kept warm and could not be loaded."""
    try:
        reply = _request_zygote(supervisor, request)
    except NotFound:
        if not supervisor.warm_set.discard(request.name):
            raise
        return Unloaded(request.name, [])
    supervisor.warm_set.discard(request.name)
    return reply


def _status(supervisor: Supervisor) -> dict[str, Any]:
    try:
        zygote = asdict(_zygote_status(supervisor, timeout_s=_STATUS_TIMEOUT_S))
    except Unavailable:
        state = "loading" if supervisor.zygote.is_ready else "starting"
        state = state if supervisor.workers else "none"
        zygote = {"pid": supervisor.zygote.pid, "state": state, "models": []}
        zygote |= {"horses": [], "standbys": []}
    return {
        "daemon": {
            "pid": os.getpid(),
            "version": __version__,
            "home": str(supervisor.home.path),
            "started": supervisor.started,
            "uptime_s": round(time.time() - supervisor.started, 1),
            "memory_bytes": memory.resident_bytes(os.getpid()),
            "stopping": supervisor.stopping,
            "upgrades": supervisor.upgrades.changes(),
            "own_upgrades": supervisor.upgrades.own_changes(),
        },
        "server": _redis(supervisor),
        "models": zygote.pop("models"),
        "workers": _workers(supervisor, zygote.pop("horses")),
        "zygote": {"state": "ready", **zygote},
        "http": {
            "pid": supervisor.services.gateway.pid,
            "url": supervisor.services.gateway.url,
            "problem": supervisor.services.gateway.problem,
            "tokens": _tokens(supervisor),
        },
    }


def _tokens(supervisor: Supervisor) -> dict[str, Any] | None:
    """The use of the gateway by named token; None where no such tokens are set."""
    use = supervisor.services.gateway.use
    if supervisor.config.http_tokens is None or use is None:
        return None
    return {
        "named": use.named,
        "problem": use.problem,
        "open": [
            {"name": name, "requests": number, "streams": use.streams.get(name, 0)}
            for name, number in use.requests.items()
        ],
    }


def _reload_status(supervisor: Supervisor) -> ReloadStatus:
    reloading = supervisor.reloading
    leaving = {worker.name for worker in supervisor.workers if worker.is_closing}
    leaving |= {child.name for child in reloading.retired if isinstance(child, WorkerChild)}
    waiting: list[RunningJob] = []
    with contextlib.suppress(redis.RedisError):  # it restarts; then they count as pending
        if not supervisor.is_redis_down:
            waiting = [running for running in _running(supervisor) if running.worker in leaving]
    busy = {running.worker for running in waiting}
    pending = [worker.name for worker in reloading.incoming]
    pending += [w.name for w in supervisor.workers if w.is_closing and w.name not in busy]
    pending += [w.name for w in supervisor.workers if not w.is_ready and not w.is_closing]
    return ReloadStatus(
        stage=reloading.stage,
        detail=reloading.detail,
        problem=reloading.problem,
        pending=pending,
        waiting=waiting,
        upgrades=supervisor.upgrades.changes(),
    )


def _redis(supervisor: Supervisor) -> dict[str, Any]:
    info: Any = supervisor.connection.info()
    return {
        "kind": info.get("server_name", "redis"),
        "embedded": supervisor.redis.embedded is not None,
        "version": info.get("valkey_version", info["redis_version"]),
        "url": redacted_url(supervisor.url),
        "pid": info.get("process_id"),
        "memory_bytes": info.get("used_memory_rss"),
        "append_only": bool(info.get("aof_enabled")),
    }


def _running(supervisor: Supervisor) -> list[RunningJob]:
    """The started jobs of this daemon's workers."""
    leaving = [c for c in supervisor.reloading.retired if isinstance(c, WorkerChild)]
    ours = {worker.redis_name: worker.name for worker in (*supervisor.workers, *leaving)}
    return [
        RunningJob(ours[name], job_id)
        for queue in QUEUES
        for job_id, name in listing.started(supervisor.connection, queue)
        if name in ours
    ]


def _workers(supervisor: Supervisor, horses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    jobs: dict[str, list[str]] = {worker.name: [] for worker in supervisor.workers}
    for running in _running(supervisor):
        jobs[running.worker].append(running.job)
    by_worker = {horse.pop("worker"): horse for horse in horses}
    return [
        {
            "name": worker.name,
            "queue": worker.config.queue,
            "isolation": worker.config.isolation,
            "slots": worker.config.slots,
            "threads": worker.config.threads,
            "pid": worker.pid,
            "state": _state(worker, jobs[worker.name]),
            "job": next(iter(jobs[worker.name]), None),
            "jobs": jobs[worker.name],
            "horse": by_worker.get(worker.redis_name),
            "uptime_s": round(time.monotonic() - worker.started, 1) if worker.started else None,
        }
        for worker in supervisor.workers
    ]


def _state(worker: WorkerChild, jobs: list[str]) -> str:
    if worker.is_closing:
        return "reloads"  # when its last job has ended
    return "busy" if jobs else "idle"
