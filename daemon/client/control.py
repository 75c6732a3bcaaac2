"""Requests to the daemon itself: start, stop and reload it, its status, its models."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import orjson

from ...configs.config import DaemonConfig, ModelConfig, parse_model
from ...jobs.errors import Conflict, Unavailable
from ..host import installed
from ..host.channel import Channel
from ..host.home import Home, private
from ..host.messages import (
    Booted,
    BootProgress,
    Failure,
    GetReady,
    GetReload,
    GetStatus,
    ListModels,
    LoadModel,
    Message,
    Model,
    Models,
    Notified,
    Ready,
    Reload,
    ReloadStatus,
    Status,
    Stop,
    Stopping,
    TestNotification,
    Unloaded,
    UnloadModel,
    decode,
)
from ..host.warm_set import known_models
from .trained import FetchReport, trained_by

# As WatchdogSec of the units of systemd: the main loop may wait a minute each for the lock of the
# embedded Redis and for its replies.
_HANGS_S = 180.0
_RELOAD_POLL_S = 0.1

Reply = TypeVar("Reply", bound=Message)


def start(config: DaemonConfig) -> Iterator[dict[str, Any]]:
    """Start a daemon in the background and yield its progress until its workers are ready.

    Progress has a `stage` (server, recovery, imports, model, ready) and `done`, and where they are
    known `name`, `seconds`, `memory_bytes`, `pid` and `note`. Raises Conflict if a daemon runs
    already, Unavailable with the reason if it cannot start.
    """
    home = Home(config.home)
    home.create()
    if home.is_locked():
        found = upgrades(home)
        hint = f"; upgraded since it started: {', '.join(found)}: `warmd reload`" if found else ""
        raise Conflict(home.occupied() + hint)
    with open(home.log, "ab", opener=private) as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "warmd.daemon"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
            cwd="/",
        )
    yield from boot(process, config)
    process.returncode = 0  # the daemon outlives this process, which never waits for it


def boot(process: subprocess.Popen[bytes], config: DaemonConfig) -> Iterator[dict[str, Any]]:
    """Send a new `python -m warmd.daemon` its config; yield its progress as `start` does.

    Closes both pipes. If the daemon cannot start, its process has ended when this raises.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        process.stdin.write(orjson.dumps(config.to_json()))
        process.stdin.close()
        for line in process.stdout:
            match decode(line):
                case Failure() as failure:
                    process.wait()
                    raise failure.to_exception()
                case BootProgress() as progress:
                    known = asdict(progress).items()
                    yield {name: value for name, value in known if value is not None}
                case Booted(pid):
                    yield {"stage": "ready", "pid": pid, "done": True}
                    return
    process.wait()
    raise Unavailable(f"the daemon ended while it was starting: see {Home(config.home).log}")


def stop(config: DaemonConfig, *, now: bool = False) -> Iterator[dict[str, Any]]:
    """Stop the daemon; yield `{"stage": "draining", "worker", "job"}` for each job that saves.

    Returns when the daemon has ended. Raises Unavailable if none runs.
    """
    home = Home(config.home)
    for running in request(home, Stop(now), Stopping).running:
        yield {"stage": "draining", **asdict(running)}
    while home.is_locked():
        time.sleep(0.02)


def reload(config: DaemonConfig) -> Iterator[dict[str, Any]]:
    """Replace zygote and workers; yield the progress until the new ones serve.

    The first has `upgrades`, in words, and stage `begin`; the last stage `ready` and `waiting`, the
    jobs that old processes still run; others `detail`. Raises Conflict if the daemon reloads
    already or the upgrade needs a restart, Unavailable if the new processes cannot start.
    """
    home = Home(config.home)
    yield {"stage": "begin", "upgrades": request(home, Reload(), ReloadStatus).upgrades}
    before = None
    while True:
        found = request(home, GetReload(), ReloadStatus)
        if found.stage == "failed":
            raise Unavailable(f"{found.problem}; the daemon keeps its processes: see {home.log}")
        if found.stage == "workers" and not found.pending:
            if found.problem is not None:
                raise Unavailable(f"{found.problem}: see {home.log}")
            yield {"stage": "ready", "waiting": [asdict(running) for running in found.waiting]}
            return
        if (found.stage, found.detail) != before:
            before = (found.stage, found.detail)
            yield {"stage": found.stage, "detail": found.detail or ", ".join(found.pending)}
        time.sleep(_RELOAD_POLL_S)


def upgrades(home: Home) -> list[str]:
    """Describe the upgrades since the daemon of a home started, without a request to it."""
    if not home.is_locked():
        return []
    before = installed.from_json((home.read_state() or {}).get("installed"))
    return installed.changes(before, installed.refreshed(before))


def status(config: DaemonConfig) -> dict[str, Any]:
    """Return daemon, Redis, zygote, models and workers. Raises Unavailable if no daemon runs."""
    return request(Home(config.home), GetStatus(), Status).document


def ready(config: DaemonConfig, *, timeout_s: float) -> dict[str, Any]:
    """Return whether the `zygote` is ready, and the `queues` that have a ready worker.

    Raises Unavailable if no daemon runs, or if it does not reply in time.
    """
    return asdict(request(Home(config.home), GetReady(), Ready, timeout_s=timeout_s))


def check_live(config: DaemonConfig, *, timeout_s: float) -> None:
    """Raise Unavailable if the daemon must be restarted: it is gone, or hangs.

    One that starts, downloads or loads models, waits for Redis, or saves at its end is live.
    """
    silent_s = ready(config, timeout_s=timeout_s)["silent_s"]
    if silent_s > _HANGS_S:
        raise Unavailable(f"the daemon of {config.home} hangs since {silent_s:.0f} s")


def check_ready(config: DaemonConfig, *, timeout_s: float) -> None:
    """Raise Unavailable if the daemon takes no jobs: it starts, ends, is drained or lacks Redis."""
    if not ready(config, timeout_s=timeout_s)["takes_jobs"]:
        folder = Home(config.home).full_folder()
        cause = "it starts, ends or waits for Redis"
        cause = cause if folder is None else f"the disk of {folder} is full"
        raise Unavailable(f"the daemon of {config.home} takes no jobs: {cause}")


def models(config: DaemonConfig) -> list[dict[str, Any]]:
    """Return the loaded models."""
    return request(Home(config.home), ListModels(), Models).models


def named_model(config: DaemonConfig, text: str, report: FetchReport | None = None) -> ModelConfig:
    """Return the configured or loaded model of a name, or the one that `[NAME=]PATH` describes.

    PATH may be a job that has trained a model. Raises ConfigError, and SpecError for a name of
    several jobs.
    """
    home = Home(config.home)
    known = {model.name: model for model in config.models} | known_models(home)
    if text in known:
        return known[text]
    model = parse_model(text, Path.cwd())
    if not os.path.isdir(model.path):
        job = model.path.removeprefix(f"{Path.cwd()}/")  # a path is absolute, unless it is a hub id
        if (trained := trained_by(config, job, report)) is not None:
            return replace(model, path=trained.path)
    return model


def load_model(config: DaemonConfig, model: ModelConfig, *, is_kept: bool = True) -> dict[str, Any]:
    """Load a model into the warm set and return it. Running jobs are not affected.

    `is_kept`: load it at every later start too.
    """
    return request(Home(config.home), LoadModel(model, is_kept), Model).model


def unload_model(config: DaemonConfig, name: str) -> dict[str, Any]:
    """Unload a model. Jobs that run with it keep it until they end.

    Returns `unloaded`, its name, and `kept_for`: the adapters until whose unloading it stays.
    """
    reply = request(Home(config.home), UnloadModel(name), Unloaded)
    return {"unloaded": reply.name, "kept_for": reply.kept_for}


def notify_test(config: DaemonConfig) -> str | None:
    """Let the daemon deliver a test notification, with its own settings; return the problem."""
    return request(Home(config.home), TestNotification(), Notified).problem


def request(
    home: Home, message: Message, expected: type[Reply], *, timeout_s: float | None = None
) -> Reply:
    """Send one request to the supervisor and return its reply.

    Raises the supervisor's WarmdError, or Unavailable.
    """
    try:
        channel = Channel.connect(home.control_socket, timeout_s=timeout_s)
        with contextlib.closing(channel):
            channel.send(message)
            reply = next(iter(channel), None)
    except TimeoutError:
        raise Unavailable(f"the daemon of {home.path} does not reply") from None
    except OSError:
        raise Unavailable(_not_running(home)) from None
    if reply is None:
        raise Unavailable(f"the daemon of {home.path} died before it replied")
    if isinstance(reply, Failure):
        raise reply.to_exception()
    assert isinstance(reply, expected)
    return reply


def _not_running(home: Home) -> str:
    if home.is_locked():
        return f"the daemon of {home.path} is starting or stopping: try again in a moment"
    return f"no daemon runs in {home.path}: start it with `warmd start`"
