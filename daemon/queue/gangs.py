"""Jobs that several nodes run together: one node leads, the others take a seat each.

The worker that pops such a job gathers a node for each seat before it begins an execution: all of
them, or none. Meanwhile the job is queued, popped for that worker. Only one job at a time gathers:
two that each held half of the nodes would wait for each other. If too few nodes come in time, the
job is set aside, and jobs with the same needs do not gather again for a while.

A gang is a hash that the leader keeps alive; `token` tells it from earlier ones of the same job.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import orjson
import redis
from rq.executions import Execution
from rq.job import Job
from rq.registry import StartedJobRegistry

from ...configs.labels import (
    GANG_ADDRESS,
    SCHEMA,
    Labels,
    line_of,
    num_nodes,
    of_node,
    parse_line,
    unmet,
)
from ...configs.queues import TRAIN
from . import keys
from .lease import LEASE_S
from .nodes import READY, NodeRegistry

# States of a seat, as its node reports them.
JOINED, STARTED, ENDED, FAILED, LOST = "joined", "started", "ended", "failed", "lost"

_SEAT = "seat "  # prefix of fields, followed by the name of the worker
_GATHERING_MS = int(LEASE_S * 1000)  # without a sign of the leader
_GANG_MS = int(4 * LEASE_S * 1000)

# Opens a gang. KEYS: the gathering job, the gang; ARGV: job, two times in ms, fields and values.
# Returns 0 while another job gathers.
_OPEN = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
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
# of seats taken, -1 if the gang has expired or the job does not wait any more.
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
redis.call('PEXPIRE', KEYS[2], ARGV[4])
if taken < tonumber(gang[2]) - 1 then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
elseif redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
return taken
"""

# Changes fields of a gang. KEYS: the gang; ARGV: token, fields and values; returns whether the gang
# is still there.
_WRITE = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 1
"""

# Gives a seat back before the execution begins. KEYS: the gang; ARGV: token, field. Returns whether
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
    """A gang as Redis has it."""

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


class Gangs:
    """All gangs of one Redis."""

    def __init__(self, connection: redis.Redis) -> None:
        self._connection = connection

    # --- gathering ------------------------------------------------------------------------------

    def may_gather(self, needs: Labels) -> bool:
        """Whether a job with these needs may gather now: enough nodes are there, and no other does.

        Nodes that run other jobs count: they may be free soon.
        """
        with self._connection.pipeline(transaction=False) as pipeline:
            pipeline.exists(keys.GATHERING)
            pipeline.exists(keys.gang_retry(line_of(needs)))
            if any(pipeline.execute()):
                return False
        return self.num_suitable(needs) >= num_nodes(needs)

    def num_suitable(self, needs: Labels) -> int:
        """Return how many nodes may take part in a job with these needs, now or later."""
        own = of_node(needs)
        return sum(
            node.state == READY
            and not node.is_draining
            and TRAIN in node.queues
            and GANG_ADDRESS in node.labels
            and not unmet(own, {**node.labels, SCHEMA: str(node.schema)})
            for node in NodeRegistry(self._connection).all()
        )

    def open(self, job_id: str, leader: str, node: str, needs: Labels) -> str | None:
        """Begin to gather nodes for a job; return the token, None while another job gathers."""
        token = secrets.token_hex(8)
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
        """Release the nodes that came: too few did. Jobs with these needs wait for `pause_s`."""
        self._connection.set(keys.gang_retry(line_of(needs)), 1, px=max(int(pause_s * 1000), 1))
        self.dissolve(job_id, token)

    def dissolve(self, job_id: str, token: str) -> None:
        """Release all nodes of a gang."""
        self._eval(_DISSOLVE, keys.GATHERING, keys.gang(job_id))(job_id, token)

    # --- seats ----------------------------------------------------------------------------------

    def join(self, job_id: str, worker: str, home_key: str, node: str) -> str | None:
        """Take a seat for a node; return the gang's token, None if there is no seat for it."""
        seat = orjson.dumps(asdict(Seat(node))).decode()
        script = self._eval(_JOIN, keys.GATHERING, keys.gang(job_id))
        token = script(job_id, worker, home_key, seat)
        return None if token is None else keys.text(token)

    def report(self, job_id: str, token: str, worker: str, seat: Seat) -> bool:
        """Store the state of a seat; False if the gang is gone."""
        return self._write(job_id, token, {f"{_SEAT}{worker}": orjson.dumps(asdict(seat)).decode()})

    def leave(self, job_id: str, token: str, worker: str) -> bool:
        """Give a seat back; False once the execution has begun."""
        return bool(self._eval(_LEAVE, keys.gang(job_id))(token, f"{_SEAT}{worker}"))

    # --- the execution --------------------------------------------------------------------------

    def begin(self, job_id: str, token: str, number: int, claim: Execution) -> bool:
        """Note the execution that the gang runs; False if the gang is gone."""
        fields = {"execution": str(number), "claim": claim.composite_key}
        return self._write(job_id, token, fields)

    def listen(self, job_id: str, token: str, host: str, port: int) -> bool:
        """Note where rank 0 listens: the others may start."""
        return self._write(job_id, token, {"host": host, "port": str(port)})

    def end(self, job_id: str, token: str) -> bool:
        """Ask all nodes to end their ranks; False if the gang is gone."""
        return self._write(job_id, token, {"end": "1"})

    def gang(self, job_id: str, *, renew: bool = False) -> Gang | None:
        """Return the gang of a job; `renew`: keep it, as its leader."""
        with self._connection.pipeline(transaction=False) as pipeline:
            pipeline.hgetall(keys.gang(job_id))
            pipeline.get(keys.GATHERING)
            if renew:
                pipeline.pexpire(keys.gang(job_id), _GANG_MS)
            raw, gathering, *_ = pipeline.execute()
        fields = {keys.text(name): keys.text(text) for name, text in raw.items()}
        if not {"token", "leader", "node", "size", "needs"} <= fields.keys():
            return None
        seats = {
            name.removeprefix(_SEAT): Seat(**orjson.loads(text))
            for name, text in fields.items()
            if name.startswith(_SEAT)
        }
        workers = [fields["leader"], *seats]
        with self._connection.pipeline(transaction=False) as pipeline:
            for worker in workers:
                pipeline.exists(keys.lease(worker))
                pipeline.hexists(keys.WORKERS, worker)  # not, once its node has seen it die
            registry = StartedJobRegistry.key_template.format(TRAIN)
            pipeline.zscore(registry, fields.get("claim", ""))
            *found, score = pipeline.execute()
        signs = zip(workers, found[::2], found[1::2], strict=True)
        alive = {
            worker for worker, has_lease, is_registered in signs if has_lease and is_registered
        }
        return Gang(
            token=fields["token"],
            leader=fields["leader"],
            node=fields["node"],
            size=int(fields["size"]),
            needs=parse_line(fields["needs"]),
            seats=seats,
            is_gathering=gathering is not None and keys.text(gathering) == job_id,
            is_leader_alive=fields["leader"] in alive,
            alive=frozenset(alive),
            execution=int(fields["execution"]) if "execution" in fields else None,
            claim=fields.get("claim"),
            has_claim=score is not None,
            host=fields.get("host", ""),
            port=int(fields["port"]) if "port" in fields else None,
            is_ending="end" in fields,
        )

    def _write(self, job_id: str, token: str, fields: Mapping[str, str]) -> bool:
        pairs = [text for pair in fields.items() for text in pair]
        return bool(self._eval(_WRITE, keys.gang(job_id))(token, *pairs))

    def _eval(self, script: str, *all_keys: str) -> Any:
        def call(*arguments: str) -> Any:
            return self._connection.eval(script, len(all_keys), *all_keys, *arguments)

        return call


def address_here(connection: redis.Redis, configured: str) -> str:
    """Return the address of this machine that a setting names, after listening there once.

    `auto`: the one from which it reaches Redis. Raises OSError and RedisError.
    """
    address = configured
    if configured == "auto":
        pool: Any = connection.connection_pool
        used = pool.get_connection()
        try:
            name = used._sock.getsockname()
        finally:
            pool.release(used)
        if not isinstance(name, tuple):
            raise OSError("Redis is reached by a unix socket")
        address = name[0]
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    socket.create_server((address, 0), family=family).close()
    return address
