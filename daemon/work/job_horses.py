"""The horses of the jobs that a worker holds: it requests them and receives their messages."""

from __future__ import annotations

import select
import time
from contextlib import suppress

from ..host.messages import GangListening, GangMet, JobActivity, JobEvent, JobOutcome, JobWaits
from .attempt import Attempt
from .held import Held
from .horse_pool import Horse
from .seat import Seat

TICK_S = 0.25  # maximum duration of one wait; messages end it earlier
_RETRY_S = 0.02  # the same while a job waits for a zygote
# Messages of a horse that name their job.
_ABOUT_A_JOB = (JobEvent, JobActivity, JobOutcome, JobWaits, GangListening, GangMet)
_FORK_S = 0.5  # for a horse to start whose model is loaded


class JobHorses:
    """Connects jobs and horses."""

    def __init__(self, held: Held) -> None:
        self._held = held

    def wait(self, *, is_redis_up: bool) -> None:
        """Wait for messages from horses, downloads and Redis, for one tick at most; handle them."""
        is_waiting = any(self._needs_horse(attempt) for attempt in self._held.attempts)
        is_waiting = is_waiting or any(seat.needs_horse for seat in self._held.gangs.seats.taken)
        is_urgent = any(
            a.settle is not None
            and a.is_stored
            and a.may_settle()
            and not self._held.gangs.is_ending(a)
            for a in self._held.attempts
        ) or any(seat.settle is not None for seat in self._held.gangs.seats.taken)
        timeout_s = 0.0 if is_urgent and is_redis_up else TICK_S
        horses = {horse.channel.fileno(): horse for horse in self._held.horses.horses}
        downloads = self._held.downloads.channels()
        sources = [*horses, *downloads, *self._held.mailbox.sockets()]
        readable, _, _ = select.select(sources, [], [], _RETRY_S if is_waiting else timeout_s)
        for source in readable:
            if source in horses:
                self._receive(horses[source])
            elif source in downloads:
                self._held.downloads.read(source)
        self._held.horses.sweep()  # at once, so that a free slot is filled without a pause

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
        other = self._held.horses.hand_over(horse)
        for attempt in attempts:
            if other is None:
                attempt.detach()  # the next step requests a horse again
            else:
                attempt.horse = other

    def withdraw(self) -> None:
        """Take back the requests for horses of jobs that are to stop before they have started.

        The zygote may load a model for minutes before it forks the horse.
        """
        now = time.monotonic()
        for attempt in self._held.attempts:
            horse = attempt.horse
            if not attempt.requested or attempt.settle is not None:
                continue
            if horse is None or horse.has_started or now < horse.requested_at + _FORK_S:
                continue
            self._held.horses.withdraw(horse)
            for one in [one for one in self._held.attempts if one.horse is horse]:
                one.detach()  # those that are not to stop request a horse again

    def attach(self) -> None:
        """Request horses for the jobs that are to get one."""
        for attempt in self._held.attempts:
            if self._needs_horse(attempt) and attempt.request is not None:
                try:
                    horse = self._held.horses.attach(attempt.request, alone=attempt.is_suspect)
                except OSError as error:  # no descriptor is free
                    attempt.run_again_after(error)
                else:
                    attempt.horse = horse
        for seat in self._held.gangs.seats.taken:
            if seat.needs_horse:
                with suppress(OSError):  # no descriptor is free: the next iteration tries again
                    seat.horse = self._held.horses.attach(seat.request, alone=True)

    def _needs_horse(self, attempt: Attempt) -> bool:
        """Whether a job is to get a horse now. Suspects get one at a time."""
        if attempt.horse is not None or attempt.settle is not None or attempt.is_downloading:
            return False
        if not attempt.may_have_horse():
            return False
        if not attempt.is_suspect:
            return True
        suspects = [
            other for other in self._held.attempts if other.is_suspect and other.settle is None
        ]
        return not any(other.horse is not None for other in suspects) and suspects[0] is attempt
