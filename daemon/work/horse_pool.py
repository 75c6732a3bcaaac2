"""The horses of one worker: how it gets them from the zygote, talks to them and ends them.

With isolation "fork" every job has a horse of its own. A resident worker keeps a horse for each
model that it is asked for, until the model is unloaded or the horse dies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

from ...configs.config import WorkerConfig
from ...configs.memory import memory_bytes
from ...configs.units import format_size
from ..host.channel import Channel
from ..host.model_files import fingerprint

log = logging.getLogger(__name__)

_LEAVING_S = 30.0  # for a horse to end after its last word
_SEND_S = 1.0  # for a zygote or a horse to take a message; one that lives has room for many


class Horse:
    """A horse as its worker sees it."""

    def __init__(self, channel: Channel, *, asked_for: str, model: Any, is_resident: bool) -> None:
        self.channel = channel
        self.asked_for = asked_for  # the job that the zygote forks it for
        self.model = model  # what it was forked with; None for no model
        self.is_resident = is_resident
        self.is_leaving = False  # takes no more jobs
        self.job_ids: set[str] = set()  # of the jobs that it runs
        self.ended_for: str | None = None  # the job for whose sake it was killed
        self._pid: int | None = None
        self._exit: dict[str, Any] = {}  # what the zygote said of its end
        self._unsent: list[dict[str, Any]] = []
        self._deadline: float | None = None

    def send(self, message: dict[str, Any]) -> None:
        """Send now, or as soon as there is somebody to hear it.

        A horse that is gone is found to be so by `receive`.
        """
        if self._pid is None:
            self._unsent.append(message)  # the zygote reads one request, and forgets the rest
        else:
            with contextlib.suppress(OSError):
                self.channel.send(message)

    def receive(self) -> list[dict[str, Any]]:
        """Return what it says of its jobs; keeps what is said of itself."""
        said = []
        for message in self.channel.receive():
            if "pid" in message:
                self._pid = message["pid"]
                unsent, self._unsent = self._unsent, []
                for waiting in unsent:
                    self.send(waiting)
            elif "exit" in message:
                self._exit = message
            elif "retire" in message:  # the zygote's: its model is no longer the warm one
                self.is_leaving = True
            else:
                said.append(message)
        return said

    @property
    def pid(self) -> int | None:
        """Its process, once it has said so."""
        return self._pid

    @property
    def has_lived(self) -> bool:
        return self._pid is not None

    def kill(self, job_id: str | None = None) -> None:
        """End it now, perhaps for the sake of one job."""
        if self._pid is not None and not self.channel.closed_by_peer:
            self.ended_for = self.ended_for or job_id
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)

    def leave(self) -> None:
        """Expect it to end by itself, soon."""
        self.is_leaving = True
        self._deadline = time.monotonic() + _LEAVING_S

    def kill_if_overdue(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.kill()

    def cause_of_death(self) -> str:
        """Say what it died of, as far as that is known."""
        code = self._exit.get("exit")
        peak = ""
        if code is not None:
            peak_bytes = self._exit["peak_bytes"]
            peak = f": peak {format_size(peak_bytes)} of {format_size(memory_bytes())}"
        if code is None:
            return "lost: its process disappeared"
        if code >= 0:
            return f"ended with exit code {code} without a result{peak}"
        name = signal.Signals(-code).name
        perhaps = ", perhaps out of memory" if -code == signal.SIGKILL else ""
        return f"killed by {name}{perhaps}{peak}"


class Stable:
    """All horses of one worker."""

    def __init__(self, socket: Path, config: WorkerConfig) -> None:
        self.horses: list[Horse] = []
        self._socket = socket
        self._config = config

    def mount(self, job_id: str, request: dict[str, Any], *, alone: bool) -> Horse | None:
        """Have a horse run the job; None while there is no zygote to fork one.

        `alone`: in a horse of its own, whatever the worker's isolation.
        """
        is_resident = self._config.isolation == "resident" and not alone
        model = _as_it_lies_there(request["model"])
        request = {**request, "model": model}
        horse = self._resident(model) if is_resident else None
        if horse is not None:
            horse.send(request)
        else:
            request = {**request, "isolation": "resident" if is_resident else "fork"}
            try:
                channel = Channel.connect(self._socket, timeout_s=_SEND_S)
                channel.send(request)
            except OSError as error:
                log.debug("zygote: %s", error)
                return None
            horse = Horse(channel, asked_for=job_id, model=model, is_resident=is_resident)
            self.horses.append(horse)
        horse.job_ids.add(job_id)
        return horse

    def _resident(self, model: Any) -> Horse | None:
        for horse in self.horses:
            # One that was heard to have died in this turn is still here: the job would be lost.
            is_alive = not (horse.is_leaving or horse.channel.closed_by_peer)
            if horse.is_resident and is_alive and horse.model == model:
                return horse
        return None

    def sweep(self) -> None:
        """Let go of the horses that have ended or have nothing left to do."""
        for horse in list(self.horses):
            horse.kill_if_overdue()
            if horse.channel.closed_by_peer or (
                horse.is_resident and horse.is_leaving and not horse.job_ids
            ):
                horse.channel.close()  # one that lives ends when it sees that
                self.horses.remove(horse)

    @property
    def num_leaving(self) -> int:
        """How many horses have had their last word and still take memory."""
        return sum(horse.is_leaving and not horse.job_ids for horse in self.horses)


def _as_it_lies_there(model: dict[str, Any] | None) -> dict[str, Any] | None:
    """A request's model with what its files are now: a resident horse has to have the same."""
    if model is None:
        return None
    files = ""
    with contextlib.suppress(OSError, ValueError):  # the zygote says what is wrong
        files = fingerprint(Path(model["folder"]))
    return {**model, "files": files}
