"""Standby horses: processes forked ahead of their jobs, whose device is ready.

Creating a CUDA context takes 0.15 to 0.5 s, and seconds on a machine without persistence mode. A
standby horse has created it before the job arrives. It has no model of its own: the zygote
dismisses it when the warm models change, as its memory is a copy of the zygote's.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ..host.channel import Channel
from ..host.messages import HorsePlan, RunJob, decode, encode

_MOST_BYTES = 1 << 18  # of a request


@dataclass(frozen=True)
class Standby:
    """A standby horse as the zygote sees it."""

    pid: int
    plan: HorsePlan
    sock: socket.socket  # over which its job will come; it ends when this is closed

    def hand_over(self, channel: Channel, request: RunJob) -> bool:
        """Give it a job and the connection to the job's worker; False if it has died."""
        try:
            socket.send_fds(self.sock, [encode(request)], [channel.fileno()])
        except OSError:
            return False
        finally:
            self.sock.close()
        return True


class Standbys:
    """The standby horses of a zygote."""

    def __init__(self, plans: Iterable[HorsePlan]) -> None:
        """`plans`: one for each configured standby horse."""
        self._wanted = Counter(plans)
        self._ready: dict[int, Standby] = {}  # by process id
        self._lost = Counter[HorsePlan]()  # died by themselves; replaced after the next job

    def missing(self) -> HorsePlan | None:
        """Return the plan of a standby horse to fork now."""
        absent = self._wanted - self._lost - Counter(one.plan for one in self._ready.values())
        return next(iter(absent), None)

    def add(self, standby: Standby) -> None:
        self._ready[standby.pid] = standby

    def take(self, plan: HorsePlan) -> Standby | None:
        """Remove and return a standby horse of this plan."""
        self._lost.clear()
        for pid, standby in self._ready.items():
            if standby.plan == plan:
                return self._ready.pop(pid)
        return None

    def dismiss(self) -> None:
        """End them all."""
        for standby in self._ready.values():
            standby.sock.close()
        self._ready = {}

    def note_death(self, pid: int) -> None:
        """Note that a process has ended, perhaps a standby horse.

        It is not replaced at once: the reason, such as a broken driver, may end the next one too.
        """
        standby = self._ready.pop(pid, None)
        if standby is not None:
            standby.sock.close()
            self._lost[standby.plan] += 1

    def note_failure(self, plan: HorsePlan) -> None:
        """Note that the machine could start no process for a plan; tried after the next job."""
        self._lost[plan] += 1

    def pids(self) -> list[int]:
        return list(self._ready)

    def close_in_fork(self) -> None:
        """Close the sockets in a child: a copy would keep a dismissed standby horse waiting."""
        for standby in self._ready.values():
            standby.sock.close()


def wait_for_job(sock: socket.socket) -> tuple[Channel, RunJob]:
    """Wait in the standby horse for its job; end the process if it is dismissed."""
    data, descriptors, _, _ = socket.recv_fds(sock, _MOST_BYTES, 1)
    request = decode(data) if data else None
    if not isinstance(request, RunJob) or not descriptors:
        os._exit(0)  # dismissed, or the zygote has died
    sock.close()
    return Channel(socket.socket(fileno=descriptors[0])), request
