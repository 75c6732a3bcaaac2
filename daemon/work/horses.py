"""The horses of a worker: requested from the zygote, sent to, read from, and ended.

With isolation "fork" every job has its own horse. A resident worker keeps one horse per model,
until the model is unloaded or the horse dies. Adapters that are served unmerged share the horse of
their base: the worker sends the first job with an adapter to the zygote, which names that horse.
"""

from __future__ import annotations

import contextlib
import logging
import select
import time
from dataclasses import replace
from pathlib import Path

from ...jobs.files.shortage import shortage
from ..host.channel import Channel
from ..host.messages import (
    GangListening,
    GangMet,
    JobActivity,
    JobEvent,
    JobOutcome,
    JobWaits,
    LocalModel,
    RunJob,
)
from ..host.model_files import fingerprint
from .attempt import Attempt, State
from .held import Held
from .horse import Horse
from .seats import Seat

log = logging.getLogger(__name__)

TICK_S = 0.25  # maximum duration of one wait; messages end it earlier
_RETRY_S = 0.02  # the same while a job waits for a zygote
# Messages of a horse that name their job.
_ABOUT_A_JOB = (JobEvent, JobActivity, JobOutcome, JobWaits, GangListening, GangMet)
_FORK_S = 0.5  # for a horse to start whose model is loaded
_SEND_TIMEOUT_S = 1.0  # for a zygote or a horse to accept a message


class Horses:
    """Connects the jobs that a worker holds with horses."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._all = held.horses

    def wait(self, *, is_redis_up: bool) -> None:
        """Wait for messages from horses, downloads and Redis, for one tick at most; handle them."""
        is_waiting = any(self._needs_horse(attempt) for attempt in self._held.attempts)
        is_waiting = is_waiting or any(seat.needs_horse for seat in self._held.gangs.seats.taken)
        is_urgent = any(
            a.has_ended and a.is_stored and a.may_settle() and not self._held.gangs.is_ending(a)
            for a in self._held.attempts
        ) or any(seat.settle is not None for seat in self._held.gangs.seats.taken)
        timeout_s = 0.0 if is_urgent and is_redis_up else TICK_S
        horses = {horse.channel.fileno(): horse for horse in self._all}
        downloads = self._held.downloads.channels()
        sources = [*horses, *downloads, *self._held.mailbox.sockets()]
        readable, _, _ = select.select(sources, [], [], _RETRY_S if is_waiting else timeout_s)
        for source in readable:
            if source in horses:
                self._receive(horses[source])
            elif source in downloads:
                self._held.downloads.read(source)
        self.sweep()  # at once, so that a free slot is filled without a pause

    def _receive(self, horse: Horse) -> None:
        attempts = {one.job.id: one for one in self._held.taken if one.job.id in horse.job_ids}
        for message in horse.receive():
            # The zygote's Failure names no job: it replies to the request for this horse.
            if isinstance(message, _ABOUT_A_JOB):
                attempt = attempts.get(message.job)
            else:
                attempt = attempts.get(horse.requested_for)
            if attempt is None:
                continue
            attempt.handle(message)
            if attempt.settle is not None or attempt.horse is None:
                del attempts[attempt.job.id]
                horse.job_ids.remove(attempt.job.id)
                if not horse.is_resident:
                    horse.leave()
        if horse.instead is not None:
            self._hand_over(horse, list(attempts.values()))
        elif horse.channel.closed_by_peer:
            for attempt in attempts.values():
                if horse.has_started or attempt.job.id == horse.requested_for:
                    attempt.conclude_death(is_shared=len(attempts) > 1)
                else:
                    attempt.detach()
            horse.job_ids.clear()

    def _hand_over(self, horse: Horse, attempts: list[Attempt | Seat]) -> None:
        """Give the jobs of a horse that the zygote did not fork to the one that has their model."""
        other = self._taker_of(horse)
        for attempt in attempts:
            if other is None:
                attempt.detach()  # the next step requests a horse again
            else:
                attempt.give(other)

    def withdraw(self) -> None:
        """Take back the requests for horses of jobs that are to stop before they have started.

        The zygote may load a model for minutes before it forks the horse.
        """
        now = time.monotonic()
        for attempt in self._held.attempts:
            horse = attempt.horse
            if not attempt.requested or attempt.has_ended:
                continue
            if horse is None or horse.has_started or now < horse.requested_at + _FORK_S:
                continue
            self._withdraw(horse)
            for one in [one for one in self._held.attempts if one.horse is horse]:
                one.detach()  # those that are not to stop request a horse again

    def attach(self) -> None:
        """Request horses for the jobs that are to get one."""
        for attempt in self._held.attempts:
            if attempt.request is not None and self._needs_horse(attempt):
                try:
                    horse = self.request(attempt.request, alone=attempt.is_suspect)
                except OSError as error:  # no descriptor is free
                    attempt.run_again_after(error)
                else:
                    if horse is not None:
                        attempt.give(horse)
        for seat in self._held.gangs.seats.taken:
            if seat.needs_horse:
                # Where no descriptor is free, the next iteration tries again.
                with contextlib.suppress(OSError):
                    if (horse := self.request(seat.request, alone=True)) is not None:
                        seat.give(horse)

    def _needs_horse(self, attempt: Attempt) -> bool:
        """Whether a job is to get a horse now. Suspects get one at a time."""
        if attempt.state is not State.READY or not attempt.may_have_horse():
            return False
        if not attempt.is_suspect:
            return True
        suspects = [
            other for other in self._held.attempts if other.is_suspect and not other.has_ended
        ]
        return not any(other.horse is not None for other in suspects) and suspects[0] is attempt

    # --- one horse ----------------------------------------------------------------------------

    def request(self, request: RunJob, *, alone: bool) -> Horse | None:
        """Send a job to a resident horse or to a new one; return None while there is no zygote.

        Raises OSError if no descriptor is free. `alone`: the job gets its own horse, whatever the
        worker's isolation.
        """
        is_resident = self._held.config.isolation == "resident" and not alone
        model = _with_fingerprint(request.model)
        request = replace(request, model=model, isolation="resident" if is_resident else "fork")
        horse = self._resident(model) if is_resident else None
        if horse is not None:
            horse.send(request)
        else:
            try:
                channel = Channel.connect(self._held.home.zygote_socket, timeout_s=_SEND_TIMEOUT_S)
                channel.send(request)
            except OSError as error:
                if shortage(error) is not None:
                    raise
                log.debug("zygote: %s", error)
                return None
            horse = Horse(channel, request)
            self._all.append(horse)
        horse.job_ids.add(request.job_id)
        return horse

    def _resident(self, model: LocalModel | None) -> Horse | None:
        for horse in self._all:
            if horse.is_resident and horse.takes_jobs and model in horse.models:
                return horse
        return None

    def _taker_of(self, horse: Horse) -> Horse | None:
        """Give the jobs of a horse that was not forked to the one in `instead`; return that one.

        None if that one is ending: the jobs need a new horse.
        """
        assert horse.instead is not None
        self._all.remove(horse)
        horse.channel.close()
        for other in self._all:
            if other.pid == horse.instead.pid and other.takes_jobs:
                other.take_over(horse, horse.instead)
                return other
        return None

    def _withdraw(self, horse: Horse) -> None:
        """Take back the request for a horse that has not started: if it starts, it ends at once."""
        horse.channel.close()
        if horse in self._all:
            self._all.remove(horse)

    def sweep(self) -> None:
        """Remove horses that have ended, and resident ones that are leaving and have no job."""
        for horse in list(self._all):
            horse.kill_if_overdue()
            if horse.channel.closed_by_peer or (
                horse.is_resident and horse.is_leaving and not horse.job_ids
            ):
                horse.channel.close()  # a living horse ends when its connection closes
                self._all.remove(horse)


def _with_fingerprint(model: LocalModel | None) -> LocalModel | None:
    """Add the fingerprint of the model's files: a resident horse must have loaded the same ones."""
    if model is None or model.folder is None:
        return model
    files = ""
    # The zygote reads the same files after this, and reports those that it cannot read.
    with contextlib.suppress(OSError, ValueError):
        files = fingerprint(Path(model.folder), model.config.response_template)
    return replace(model, files=files)
