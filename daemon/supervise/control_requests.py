"""Replies to requests on the control socket: status, models, load, unload, stop."""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from typing import Any

import redis

from ... import __version__
from ...configs.config import ModelConfig, redacted_url
from ...configs.queues import QUEUES
from ...jobs.errors import Unavailable, WarmdError
from ..host import downloads, memory
from ..host.channel import Channel
from ..queue import listing
from .supervisor import Supervisor

_PATIENCE_S = 1.0  # with a zygote that is asked for no more than how it is


def answer(supervisor: Supervisor, request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request. Raises WarmdError."""
    match request["op"]:
        case "stop":
            how = "now" if request["now"] else "drain"
            running = []  # a server that is away keeps nobody from stopping
            with contextlib.suppress(redis.RedisError):
                if not supervisor.is_server_away:
                    running = _running(supervisor)
            supervisor.stop(how)
            return {"running": running}
        case "load":
            config = ModelConfig(**request["model"])
            over = partial(_is_stopping, supervisor)
            folder = downloads.folder_of(config, is_newest=True, over=over)
            model = {"config": config.__dict__, "folder": str(folder)}
            loaded = ask_zygote(supervisor, {"op": "load", "model": model})
            supervisor.warm_set.add(config, is_kept=request["is_kept"])
            return loaded
        case "unload":
            reply = ask_zygote(supervisor, {"op": "unload", "name": request["name"]})
            supervisor.warm_set.discard(request["name"])
            return reply
        case "models":
            return {"models": ask_zygote(supervisor, {"op": "status"})["models"]}
        case "status":
            return _status(supervisor)
        case "ready":
            # Asked every few seconds: of nobody who may be busy.
            workers = [worker for worker in supervisor.workers if worker.is_ready]
            queues = sorted({worker.config.queue for worker in workers})
            return {"zygote": supervisor.zygote.is_ready, "queues": queues}
        case unknown:
            raise LookupError(unknown)


def _is_stopping(supervisor: Supervisor) -> bool:
    return supervisor.stopping is not None


def ask_zygote(
    supervisor: Supervisor, request: dict[str, Any], *, timeout_s: float = 600.0
) -> dict[str, Any]:
    """Put a question to the zygote, which answers none while it loads a model.

    Raises the zygote's own WarmdError, or Unavailable.
    """
    try:
        channel = Channel.connect(supervisor.home.zygote_socket, timeout_s=timeout_s)
        with contextlib.closing(channel):
            channel.send(request)
            reply = next(iter(channel), None)
    except OSError as error:
        raise Unavailable("the zygote is starting: try again in a few seconds") from error
    if reply is None:
        raise Unavailable("the zygote died meanwhile: see `warmd logs`")
    if "error" in reply:
        failure = WarmdError(reply["error"])
        failure.exit_code = reply["exit_code"]
        raise failure
    return reply


def _status(supervisor: Supervisor) -> dict[str, Any]:
    try:
        zygote = ask_zygote(supervisor, {"op": "status"}, timeout_s=_PATIENCE_S)
    except Unavailable:
        state = "loading" if supervisor.zygote.is_ready else "starting"
        zygote = {"pid": supervisor.zygote.pid, "state": state, "models": [], "horses": []}
    return {
        "daemon": {
            "pid": os.getpid(),
            "version": __version__,
            "home": str(supervisor.home.path),
            "started": supervisor.started,
            "uptime_s": round(time.time() - supervisor.started, 1),
            "memory_bytes": memory.resident_bytes(os.getpid()),
            "stopping": supervisor.stopping,
        },
        "server": _server(supervisor),
        "models": zygote.pop("models"),
        "workers": _workers(supervisor, zygote.pop("horses")),
        "zygote": {"state": "ready", **zygote},
        "http": {
            "pid": supervisor.gateway.pid,
            "url": supervisor.gateway.url,
            "problem": supervisor.gateway.problem,
        },
    }


def _server(supervisor: Supervisor) -> dict[str, Any]:
    info: Any = supervisor.connection.info()
    return {
        "kind": info.get("server_name", "redis"),
        "embedded": supervisor.server is not None,
        "version": info.get("valkey_version", info["redis_version"]),
        "url": redacted_url(supervisor.url),
        "pid": info.get("process_id"),
        "memory_bytes": info.get("used_memory_rss"),
        "append_only": bool(info.get("aof_enabled")),
    }


def _running(supervisor: Supervisor) -> list[dict[str, str]]:
    """The started jobs of this daemon's workers."""
    ours = {worker.redis_name: worker.name for worker in supervisor.workers}
    return [
        {"worker": ours[name], "job": job_id}
        for queue in QUEUES
        for job_id, name in listing.started(supervisor.connection, queue)
        if name in ours
    ]


def _workers(supervisor: Supervisor, horses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    jobs: dict[str, list[str]] = {worker.name: [] for worker in supervisor.workers}
    for entry in _running(supervisor):
        jobs[entry["worker"]].append(entry["job"])
    by_worker = {horse.pop("worker"): horse for horse in horses}
    return [
        {
            "name": worker.name,
            "queue": worker.config.queue,
            "isolation": worker.config.isolation,
            "slots": worker.config.slots,
            "threads": worker.config.threads,
            "pid": worker.pid,
            "state": "busy" if jobs[worker.name] else "idle",
            "job": next(iter(jobs[worker.name]), None),
            "jobs": jobs[worker.name],
            "horse": by_worker.get(worker.redis_name),
            "uptime_s": round(time.monotonic() - worker.started, 1) if worker.started else None,
        }
        for worker in supervisor.workers
    ]
