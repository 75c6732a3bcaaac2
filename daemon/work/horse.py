"""A horse as its worker sees it: what it was sent, what it reported, and how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace

from ...configs.memory import memory_bytes
from ...configs.units import format_size
from ...jobs.errors import LOST_CONTEXT_EXIT
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

_EXIT_TIMEOUT_S = 30.0  # for a horse to end after its last outcome


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
    def takes_jobs(self) -> bool:
        """Whether it may get another job. It stays listed after its connection has closed."""
        return not (self.is_leaving or self.channel.closed_by_peer)

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


def _name(model: LocalModel | None) -> str | None:
    return None if model is None else model.config.name
