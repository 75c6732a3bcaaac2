"""What the command line does to a daemon: start it, ask it, change it, stop it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import orjson

from ...configs.config import DaemonConfig, ModelConfig
from ...jobs.errors import Conflict, Unavailable, WarmdError
from ..host.channel import Channel
from ..host.home import Home


def start(config: DaemonConfig) -> Iterator[dict[str, Any]]:
    """Start a daemon in the background and yield its progress until its workers are warm.

    Messages have a `stage` (server, imports, model, ready), `name`, `seconds`, `memory_bytes` and
    `done`. Raises Conflict when one runs already, Unavailable with the reason when it cannot boot.
    """
    home = Home(config.home)
    home.create()
    if home.is_locked():
        raise Conflict(home.occupied())
    with open(home.log, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "warmd.daemon"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
            cwd="/",
        )
    yield from boot(process, config)
    process.returncode = 0  # it lives on without us; nobody waits for it


def boot(process: subprocess.Popen[bytes], config: DaemonConfig) -> Iterator[dict[str, Any]]:
    """Give a fresh `python -m warmd.daemon` its config; yield its progress as `start` does.

    Both pipes are closed afterwards. What cannot boot has ended when it raises.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        process.stdin.write(orjson.dumps(config.to_json()))
        process.stdin.close()
        for line in process.stdout:
            message = orjson.loads(line)
            if "error" in message:
                process.wait()
                failure = WarmdError(message["error"])
                failure.exit_code = message["exit_code"]
                raise failure
            yield message
            if message["stage"] == "ready":
                return
    process.wait()
    raise Unavailable(f"the daemon ended while it was starting: see {Home(config.home).log}")


def stop(config: DaemonConfig, *, now: bool = False) -> Iterator[dict[str, Any]]:
    """Stop the daemon; yield `{"stage": "draining", "worker", "job"}` for what is still saving.

    Ends when the daemon is gone. Raises Unavailable when none runs.
    """
    home = Home(config.home)
    reply = ask(home, {"op": "stop", "now": now})
    for running in reply["running"]:
        yield {"stage": "draining", **running}
    while home.is_locked():
        time.sleep(0.02)


def status(config: DaemonConfig) -> dict[str, Any]:
    """Return daemon, server, zygote, models and workers. Raises Unavailable when none runs."""
    return ask(Home(config.home), {"op": "status"})


def ready(config: DaemonConfig, *, timeout_s: float) -> dict[str, Any]:
    """Return whether the zygote is warm, and the `queues` that have a worker, from the supervisor.

    Raises Unavailable when none runs, or does not answer in time.
    """
    return ask(Home(config.home), {"op": "ready"}, timeout_s=timeout_s)


def models(config: DaemonConfig) -> list[dict[str, Any]]:
    """Return the warm models."""
    found: list[dict[str, Any]] = ask(Home(config.home), {"op": "models"})["models"]
    return found


def load_model(config: DaemonConfig, model: ModelConfig, *, is_kept: bool = True) -> dict[str, Any]:
    """Load a model into the warm set and return it. Running jobs notice nothing.

    One that `is_kept` is loaded at the next start, too.
    """
    request = {"op": "load", "model": model.__dict__, "is_kept": is_kept}
    return ask(Home(config.home), request)


def unload_model(config: DaemonConfig, name: str) -> dict[str, Any]:
    """Take a model out of the warm set. Jobs that run with it keep it to their end."""
    return ask(Home(config.home), {"op": "unload", "name": name})


def ask(home: Home, request: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
    """Put one question to the supervisor. Raises its WarmdError, or Unavailable."""
    try:
        channel = Channel.connect(home.control_socket, timeout_s=timeout_s)
        with contextlib.closing(channel):
            channel.send(request)
            reply = next(iter(channel), None)
    except TimeoutError:
        raise Unavailable(f"the daemon of {home.path} does not answer") from None
    except OSError:
        raise Unavailable(_nobody(home)) from None
    if reply is None:
        raise Unavailable(f"the daemon of {home.path} died while it was asked")
    if "error" in reply:
        failure = WarmdError(reply["error"])
        failure.exit_code = reply["exit_code"]
        raise failure
    return reply


def _nobody(home: Home) -> str:
    if home.is_locked():
        return f"the daemon of {home.path} is starting or stopping: try again in a moment"
    return f"no daemon runs in {home.path}: start it with `warmd start`"
