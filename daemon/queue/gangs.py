"""Gangs: jobs that several nodes run together; one node leads, each other node takes a seat.

The worker that pops such a job gathers a node for each seat before it begins an execution: all of
them, or none. Meanwhile the job is queued, popped for that worker. Only one job at a time gathers:
two that each held half of the nodes would wait for each other. If too few nodes come in time, the
job is set aside, and jobs with the same needs do not gather again for a while.

A gang is a hash whose expiry the leader renews. Its `token` distinguishes it from earlier gangs of
the job, and is the secret by which the ranks of its nodes recognize each other: whoever may read it
owns this Redis. The hash has a field for each seat. It does not record whether a worker is alive:
it is if it has its lease, and if its node has not reported its death.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson
import redis

from ...configs.labels import (
    GANG_ADDRESS,
    GANG_SOFTWARE,
    SCHEMA,
    Labels,
    line_of,
    num_nodes,
    of_node,
    parse_line,
    unmet,
)
from ...configs.queues import TRAIN
from ...jobs.files import records
from . import keys
from .keys import LEASE_S
from .nodes import READY, NodeRegistry
from .rq_format import Execution, Job, StartedJobRegistry

# States of a seat, as its node reports them.
JOINED, STARTED, ENDED, FAILED, LOST = "joined", "started", "ended", "failed", "lost"

SEAT = "seat "  # prefix of fields, followed by the name of the worker

_GATHERING_MS = int(LEASE_S * 1000)  # without a sign of the leader
_GANG_MS = int(4 * LEASE_S * 1000)

# Opens a gang. KEYS: the gathering job, the gang; ARGV: job, two times in ms, fields and values.
# Returns 0 while another job gathers. A record without an expiry is damaged: it would stay forever.
_OPEN = """
if redis.call('PTTL', KEYS[1]) > 0 then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('DEL', KEYS[2])
for i = 4, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return 1
"""

# Takes a seat. KEYS: the gathering job, the gang; ARGV: job, worker, key of its home, seat. A node
# has one seat at most. Returns the gang's token.
_JOIN = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return false end
local found = redis.call('HGETALL', KEYS[2])
local gang, taken = {}, 0
for i = 1, #found, 2 do
  gang[found[i]] = found[i + 1]
  local worker = string.match(found[i], '^seat (.*)$')
  if worker then
    taken = taken + 1
    if string.match(worker, '^[^:]*:([^:]*):') == ARGV[3] then return false end
  end
end
if not gang.token or taken >= tonumber(gang.size) - 1 then return false end
if string.match(gang.leader, '^[^:]*:([^:]*):') == ARGV[3] then return false end
redis.call('HSET', KEYS[2], 'seat ' .. ARGV[2], ARGV[4])
return gang.token
"""

# Closes a gang once all seats are taken, by workers that are alive. KEYS: the gathering job, the
# gang, the hash of the job; ARGV: job, token, two times in ms, prefix of leases. Returns the number
# of seats taken, -1 if the gang has expired, the job does not wait any more, or seats are free and
# another job gathers: this leader was suspended.
_CLOSE = """
local gang = redis.call('HMGET', KEYS[2], 'token', 'size')
if gang[1] ~= ARGV[2] or redis.call('HGET', KEYS[3], 'status') ~= 'queued' then return -1 end
local taken = 0
for _, field in ipairs(redis.call('HKEYS', KEYS[2])) do
  local worker = string.match(field, '^seat (.*)$')
  if worker and redis.call('EXISTS', ARGV[5] .. worker) == 1 then
    taken = taken + 1
  elseif worker then
    redis.call('HDEL', KEYS[2], field)
  end
end
local gathering = redis.call('GET', KEYS[1])
if taken < tonumber(gang[2]) - 1 then
  if gathering and gathering ~= ARGV[1] then return -1 end
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
elseif gathering == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return taken
"""

# Changes fields of a gang. KEYS: the gang; ARGV: token, how many seats must still be taken, their
# fields, then fields and values. Returns whether the gang and these seats are still there: a report
# must not take back a seat that was released or removed.
_WRITE = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
local first = 3 + tonumber(ARGV[2])
for i = 3, first - 1 do
  if redis.call('HEXISTS', KEYS[1], ARGV[i]) == 0 then return 0 end
end
for i = first, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 1
"""

# Releases a seat before the execution begins. KEYS: the gang; ARGV: token, field. Returns whether
# it did.
_LEAVE = """
local gang = redis.call('HMGET', KEYS[1], 'token', 'execution')
if gang[1] ~= ARGV[1] or gang[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[2])
return 1
"""

# Deletes a gang. KEYS: the gathering job, the gang; ARGV: job, token.
_DISSOLVE = """
if redis.call('HGET', KEYS[2], 'token') ~= ARGV[2] then return end
redis.call('DEL', KEYS[2])
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""


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
    seats = {}
    for name, text in fields.items():
        if name.startswith(SEAT):
            with suppress(ValueError):
                seats[name.removeprefix(SEAT)] = records.decode(text, Seat)
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


class Gangs:
    """All gangs of one Redis."""

    def __init__(self, connection: redis.Redis) -> None:
        self._connection = connection

    # --- gathering ------------------------------------------------------------------------------

    def may_gather(self, needs: Labels) -> bool:
        """Whether a job with these needs may gather now: enough nodes are present, and no other job
        gathers.

        Nodes that run other jobs count: they may be free soon.
        """
        with self._connection.pipeline(transaction=False) as pipeline:
            pipeline.pttl(keys.GATHERING)
            pipeline.exists(keys.gang_retry(line_of(needs)))
            left_ms, must_wait = pipeline.execute()
        if left_ms > 0 or must_wait:  # without an expiry it is damaged: see _OPEN
            return False
        return self.num_suitable(needs) >= num_nodes(needs)

    def num_suitable(self, needs: Labels) -> int:
        """Return how many nodes of the same software may take part in a job, now or later."""
        own = of_node(needs)
        suitable = Counter(
            node.labels.get(GANG_SOFTWARE)
            for node in NodeRegistry(self._connection).all()
            if node.state == READY
            and not node.is_draining
            and TRAIN in node.queues
            and GANG_ADDRESS in node.labels
            and not unmet(own, {**node.labels, SCHEMA: str(node.schema)})
        )
        return max(suitable.values(), default=0)

    def open(self, job_id: str, leader: str, node: str, needs: Labels) -> str | None:
        """Begin to gather nodes for a job; return the token, None while another job gathers."""
        token = secrets.token_hex(32)
        fields = {
            "token": token,
            "leader": leader,
            "node": node,
            "size": str(num_nodes(needs)),
            "needs": line_of(of_node(needs)),
        }
        pairs = [text for pair in fields.items() for text in pair]
        times = (str(_GATHERING_MS), str(_GANG_MS))
        opened = self._eval(_OPEN, keys.GATHERING, keys.gang(job_id))(job_id, *times, *pairs)
        return token if opened else None

    def close(self, job_id: str, token: str) -> int:
        """Close the gang if all seats are taken; return how many are, -1 if it is over."""
        all_keys = (keys.GATHERING, keys.gang(job_id), Job.key_for(job_id))
        times = (str(_GATHERING_MS), str(_GANG_MS))
        return int(self._eval(_CLOSE, *all_keys)(job_id, token, *times, keys.lease("")))

    def give_up(self, job_id: str, token: str, needs: Labels, *, pause_s: float) -> None:
        """Release the nodes: too few came. Jobs with these needs wait for `pause_s`."""
        self._connection.set(keys.gang_retry(line_of(needs)), 1, px=max(int(pause_s * 1000), 1))
        self.dissolve(job_id, token)

    def dissolve(self, job_id: str, token: str) -> None:
        """Release all nodes of a gang."""
        self._eval(_DISSOLVE, keys.GATHERING, keys.gang(job_id))(job_id, token)

    # --- seats ----------------------------------------------------------------------------------

    def join(self, job_id: str, worker: str, home_key: str, node: str) -> str | None:
        """Take a seat for a node; return the gang's token, None if there is no seat for it."""
        seat = orjson.dumps(Seat(node)).decode()
        script = self._eval(_JOIN, keys.GATHERING, keys.gang(job_id))
        token = script(job_id, worker, home_key, seat)
        return None if token is None else keys.text(token)

    def report(self, job_id: str, token: str, worker: str, seat: Seat) -> bool:
        """Store the state of a seat; False if the gang is gone, or the worker has no seat in it."""
        fields = {f"{SEAT}{worker}": orjson.dumps(seat).decode()}
        return self._write(job_id, token, fields, seats=[worker])

    def leave(self, job_id: str, token: str, worker: str) -> bool:
        """Release a seat; False once the execution has begun."""
        return bool(self._eval(_LEAVE, keys.gang(job_id))(token, f"{SEAT}{worker}"))

    # --- the execution --------------------------------------------------------------------------

    def begin(self, job_id: str, token: str, number: int, claim: Execution) -> Gang | None:
        """Note the execution that the gang runs: from now on no seat can be released.

        Returns the gang; None if it is gone, or a seat is free.
        """
        gang = self.gang(job_id)
        if gang is None or len(gang.seats) < gang.size - 1:
            return None
        fields = {"execution": str(number), "claim": claim.composite_key}
        return gang if self._write(job_id, token, fields, seats=[*gang.seats]) else None

    def listen(self, job_id: str, token: str, host: str, port: int) -> bool:
        """Note where rank 0 listens: the others may start."""
        return self._write(job_id, token, {"host": host, "port": str(port)})

    def end(self, job_id: str, token: str) -> bool:
        """Ask all nodes to end their ranks; False if the gang is gone."""
        return self._write(job_id, token, {"end": "1"})

    def gang(self, job_id: str, *, renew: bool = False) -> Gang | None:
        """Return the gang of a job; `renew`: keep it, as its leader."""
        if renew:
            self._connection.pexpire(keys.gang(job_id), _GANG_MS)
        return read_gang(self._connection, job_id)

    def _write(
        self, job_id: str, token: str, fields: Mapping[str, str], *, seats: Sequence[str] = ()
    ) -> bool:
        """Change fields of a gang; `seats`: the workers that must still have theirs."""
        needed = [f"{SEAT}{worker}" for worker in seats]
        pairs = [text for pair in fields.items() for text in pair]
        script = self._eval(_WRITE, keys.gang(job_id))
        return bool(script(token, str(len(needed)), *needed, *pairs))

    def _eval(self, script: str, *all_keys: str) -> Any:
        def call(*arguments: str) -> Any:
            return self._connection.eval(script, len(all_keys), *all_keys, *arguments)

        return call
