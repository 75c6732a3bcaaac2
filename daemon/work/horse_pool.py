"""The horses of one worker: requesting them from the zygote, sending to them, ending them.

With isolation "fork" every job has its own horse. A resident worker keeps one horse per model,
until the model is unloaded or the horse dies. Adapters that are served unmerged share the horse of
their base: the worker sends the first job with an adapter to the zygote, which names that horse.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from ...configs.config import WorkerConfig
from ...configs.memory import memory_bytes
from ...configs.units import format_size
from ...jobs.errors import LOST_CONTEXT_EXIT
from ...jobs.files.shortage import shortage
from ..host.channel import Channel
from ..host.messages import (
    DropAdapter,
    HorseExit,
    HorseStarted,
    LocalModel,
    Message,
    RetireHorse,
    RunJob,
    UseHorse,
)
from ..host.model_files import fingerprint

log = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 30.0  # for a horse to end after its last outcome
_SEND_TIMEOUT_S = 1.0  # for a zygote or a horse to accept a message


class Horse:
    """A horse as its worker sees it."""

    def __init__(self, channel: Channel, request: RunJob) -> None:
        """`request`: the job that the zygote forks it for."""
        self.channel = channel
        self.requested_for = request.job_id
        self.models = [request.model]  # that it serves: the one it was forked with, and adapters
        self.is_resident = request.isolation == "resident"
        self.instead: UseHorse | None = None  # no horse was forked: another one has the model
        self.is_leaving = False  # takes no more jobs
        self.job_ids: set[str] = set()  # of the jobs that it runs
        self.killed_for: str | None = None  # the job because of which it was killed
        self.pid: int | None = None  # once it has started
        self.requested_at = time.monotonic()
        self._exit: HorseExit | None = None
        self._request = request
        self._unsent: list[Message] = []
        self._deadline: float | None = None

    def send(self, message: Message) -> None:
        """Send now, or once the horse has started. A dead horse is noticed by `receive`."""
        if self.pid is None:
            self._unsent.append(message)  # the zygote reads only the first request
        else:
            with contextlib.suppress(OSError):
                self.channel.send(message)

    def receive(self) -> list[Message]:
        """Read once; return the messages about its jobs and handle those about the horse."""
        about_jobs = []
        for message in self.channel.receive():
            match message:
                case HorseStarted():
                    self.pid = message.pid
                    unsent, self._unsent = self._unsent, []
                    for waiting in unsent:
                        self.send(waiting)
                case HorseExit():
                    self._exit = message
                case RetireHorse():
                    self.is_leaving = True
                case UseHorse():
                    self.instead = message
                case DropAdapter():
                    self.models = [m for m in self.models if _name(m) != message.name]
                    self.send(message)
                case _:
                    about_jobs.append(message)
        return about_jobs

    def take_over(self, other: Horse, instead: UseHorse) -> None:
        """Take the jobs of a horse that was not forked, as the zygote requested in `instead`."""
        self.models += [model for model in other.models if model not in self.models]
        self.send(replace(other._request, is_model_changed=instead.is_model_changed))
        for message in other._unsent:
            self.send(message)
        self.job_ids |= other.job_ids

    @property
    def has_started(self) -> bool:
        return self.pid is not None

    def kill(self, job_id: str | None = None) -> None:
        """Kill it now; `job_id`: because of this job."""
        if self.pid is not None and not self.channel.closed_by_peer:
            self.killed_for = self.killed_for or job_id
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def leave(self) -> None:
        """Send it no more jobs; it must exit within `_EXIT_TIMEOUT_S`."""
        self.is_leaving = True
        self._deadline = time.monotonic() + _EXIT_TIMEOUT_S

    def kill_if_overdue(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.kill()

    def has_failed(self) -> bool:
        """Whether it ended by itself, with an error: no signal killed it."""
        return self._exit is None or self._exit.code > 0

    def cause_of_death(self) -> str:
        """Return the known cause of its death."""
        if self._exit is None:
            return "lost: its process disappeared"
        code = self._exit.code
        peak = f": peak {format_size(self._exit.peak_bytes)} of {format_size(memory_bytes())}"
        if code == LOST_CONTEXT_EXIT:
            return "ended because the GPU failed (its CUDA context is lost)"
        if code >= 0:
            return f"ended with exit code {code} without a result{peak}"
        name = signal.Signals(-code).name
        perhaps = ", perhaps out of memory" if -code == signal.SIGKILL else ""
        return f"killed by {name}{perhaps}{peak}"


class HorsePool:
    """All horses of one worker."""

    def __init__(self, socket: Path, config: WorkerConfig) -> None:
        """`socket`: the zygote's."""
        self.horses: list[Horse] = []
        self._socket = socket
        self._config = config

    def attach(self, request: RunJob, *, alone: bool) -> Horse | None:
        """Send a job to a resident horse or to a new one; return None while there is no zygote.

        Raises OSError if no descriptor is free. `alone`: the job gets its own horse, whatever the
        worker's isolation.
        """
        is_resident = self._config.isolation == "resident" and not alone
        model = _with_fingerprint(request.model)
        request = replace(request, model=model, isolation="resident" if is_resident else "fork")
        horse = self._resident(model) if is_resident else None
        if horse is not None:
            horse.send(request)
        else:
            try:
                channel = Channel.connect(self._socket, timeout_s=_SEND_TIMEOUT_S)
                channel.send(request)
            except OSError as error:
                if shortage(error) is not None:
                    raise
                log.debug("zygote: %s", error)
                return None
            horse = Horse(channel, request)
            self.horses.append(horse)
        horse.job_ids.add(request.job_id)
        return horse

    def _resident(self, model: LocalModel | None) -> Horse | None:
        for horse in self.horses:
            if horse.is_resident and _takes_jobs(horse) and model in horse.models:
                return horse
        return None

    def hand_over(self, horse: Horse) -> Horse | None:
        """Give the jobs of a horse that was not forked to the one in `instead`; return that one.

        None if that one is ending: the jobs need a new horse.
        """
        assert horse.instead is not None
        self.horses.remove(horse)
        horse.channel.close()
        for other in self.horses:
            if other.pid == horse.instead.pid and _takes_jobs(other):
                other.take_over(horse, horse.instead)
                return other
        return None

    def withdraw(self, horse: Horse) -> None:
        """Take back the request for a horse that has not started: if it starts, it ends at once."""
        horse.channel.close()
        if horse in self.horses:
            self.horses.remove(horse)

    def sweep(self) -> None:
        """Remove horses that have ended, and resident ones that are leaving and have no job."""
        for horse in list(self.horses):
            horse.kill_if_overdue()
            if horse.channel.closed_by_peer or (
                horse.is_resident and horse.is_leaving and not horse.job_ids
            ):
                horse.channel.close()  # a living horse ends when its connection closes
                self.horses.remove(horse)

    @property
    def num_leaving(self) -> int:
        """How many horses have no job left but have not exited: they still take memory."""
        return sum(horse.is_leaving and not horse.job_ids for horse in self.horses)


def _takes_jobs(horse: Horse) -> bool:
    # A horse whose connection has closed stays in the list until `sweep`.
    return not (horse.is_leaving or horse.channel.closed_by_peer)


def _name(model: LocalModel | None) -> str | None:
    return None if model is None else model.config.name


def _with_fingerprint(model: LocalModel | None) -> LocalModel | None:
    """Add the fingerprint of the model's files: a resident horse must have loaded the same ones."""
    if model is None or model.folder is None:
        return model
    files = ""
    # The zygote reads the same files after this, and reports those that it cannot read.
    with contextlib.suppress(OSError, ValueError):
        files = fingerprint(Path(model.folder))
    return replace(model, files=files)
