"""The record of a gang and its seats in Redis: a hash with a field for each seat.

The hash does not record whether a worker is alive: it is if it has its lease, and if its node has
not reported its death.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import orjson
import redis

from ...configs.labels import parse_line
from ...configs.queues import TRAIN
from . import keys
from .rq_format import StartedJobRegistry

# States of a seat, as its node reports them.
JOINED, STARTED, ENDED, FAILED, LOST = "joined", "started", "ended", "failed", "lost"

SEAT = "seat "  # prefix of fields, followed by the name of the worker


@dataclass(frozen=True)
class Seat:
    """One node of a gang but the first."""

    node: str
    state: str = JOINED
    detail: str = ""  # of one that failed or was lost
    wants_end: bool = False  # the node stops: the job is to save and be queued again


@dataclass(frozen=True)
class Gang:
    """The record of a gang."""

    token: str
    leader: str  # worker
    node: str  # of the leader
    size: int
    needs: dict[str, str]  # of each node
    seats: Mapping[str, Seat]  # by worker
    is_gathering: bool
    is_leader_alive: bool
    alive: frozenset[str]  # workers of seats
    execution: int | None = None  # its number, once it has begun
    claim: str | None = None  # member of the registry of started jobs
    has_claim: bool = False  # whether the execution is the current one
    host: str = ""
    port: int | None = None
    is_ending: bool = False  # the execution ends: all ranks are to end

    @property
    def workers(self) -> list[str]:
        """The workers in the order of their ranks."""
        return [self.leader, *sorted(self.seats, key=lambda worker: self.seats[worker].node)]

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes in the order of their ranks."""
        return [self.node, *sorted(seat.node for seat in self.seats.values())]


def read_gang(connection: redis.Redis, job_id: str) -> Gang | None:
    """Return the current record of a job's gang; None if there is none, or if it is not valid.

    A seat that is not valid counts as free.
    """
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.hgetall(keys.gang(job_id))
        pipeline.get(keys.GATHERING)
        raw, gathering = pipeline.execute()
    fields = {keys.text(name): keys.text(text) for name, text in raw.items()}
    if not {"token", "leader", "node", "size", "needs"} <= fields.keys():
        return None
    numbers = {name: _number(fields.get(name)) for name in ("size", "execution", "port")}
    if (size := numbers["size"]) is None:
        return None
    found_seats = {
        name.removeprefix(SEAT): _seat(text)
        for name, text in fields.items()
        if name.startswith(SEAT)
    }
    seats = {worker: seat for worker, seat in found_seats.items() if seat is not None}
    workers = [fields["leader"], *seats]
    with connection.pipeline(transaction=False) as pipeline:
        for worker in workers:
            pipeline.exists(keys.lease(worker))
            pipeline.hexists(keys.WORKERS, worker)  # not alive once its node has reported its death
        registry = StartedJobRegistry.key_template.format(TRAIN)
        pipeline.zscore(registry, fields.get("claim", ""))
        *found, score = pipeline.execute()
    signs = zip(workers, found[::2], found[1::2], strict=True)
    alive = {worker for worker, has_lease, is_registered in signs if has_lease and is_registered}
    return Gang(
        token=fields["token"],
        leader=fields["leader"],
        node=fields["node"],
        size=size,
        needs=parse_line(fields["needs"]),
        seats=seats,
        is_gathering=gathering is not None and keys.text(gathering) == job_id,
        is_leader_alive=fields["leader"] in alive,
        alive=frozenset(alive),
        execution=numbers["execution"],
        claim=fields.get("claim"),
        has_claim=score is not None,
        host=fields.get("host", ""),
        port=numbers["port"],
        is_ending="end" in fields,
    )


def _number(text: str | None) -> int | None:
    is_number = text is not None and text.isascii() and text.isdigit() and len(text) < 10
    return int(text) if text is not None and is_number else None


def _seat(text: str) -> Seat | None:
    """The seat in a field. Another version may write more."""
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(document, dict) or not isinstance(document.get("node"), str):
        return None
    return Seat(
        node=document["node"],
        state=str(document.get("state", JOINED)),
        detail=str(document.get("detail", "")),
        wants_end=bool(document.get("wants_end")),
    )
