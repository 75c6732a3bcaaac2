"""The places in a queue, divided between the clients of several tokens.

A full queue still takes jobs of a client that holds less than its fair share of the places, and the
waiting requests of several clients take turns. Jobs that this process did not queue (command line,
other gateways, before its start) count as those of one more client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_MOST_KNOWN = 20_000  # jobs; beyond that the oldest are dropped, which have left their queue

_Share = str | None  # None: unknown


class QueueShares:
    """Which client has queued which job. For one event loop."""

    def __init__(self) -> None:
        self._shares: dict[str, str] = {}  # job id -> share of its client

    def note(self, job_id: str, share: str) -> None:
        """Note a job that is about to be queued."""
        self._shares[job_id] = share
        if len(self._shares) > _MOST_KNOWN:
            for old in list(self._shares)[: _MOST_KNOWN // 2]:
                del self._shares[old]

    def has_room(self, waiting: Sequence[str], share: str, limit: int) -> bool:
        """Whether a client holds less than its fair share of `limit` places. `waiting`: job ids."""
        held: Counter[_Share] = Counter(self._shares.get(job_id) for job_id in waiting)
        held[share] += 0  # it counts as a client even without a job
        return held[share] < limit // len(held)

    def turn(self, waiting: Sequence[str], share: str) -> int | None:
        """Return the position, 1 for the next, of a client's new job; None: the last one.

        `waiting`: the other jobs in the queue, in order. The n-th job of each client comes before
        the n+1-th of any other.
        """
        number = 1 + sum(self._shares.get(job_id) == share for job_id in waiting)
        seen: Counter[_Share] = Counter()
        for position, job_id in enumerate(waiting, start=1):
            seen[self._shares.get(job_id)] += 1
            if seen[self._shares.get(job_id)] > number:
                return position
        return None
