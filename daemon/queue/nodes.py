"""The nodes: the daemons that share a Redis, each with its labels, jobs and latest heartbeat.

All times are by Redis' clock, so the clocks of the machines need not agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import orjson
import redis

from ...jobs.errors import NotFound, SpecError
from ...jobs.files import records
from . import keys
from .election import leader
from .keys import LEASE_S

BEAT_S = LEASE_S / 5  # between two heartbeats
_FORGOTTEN_S = 86_400.0  # after which a silent node is removed from the list
_LATE_S = 3600  # for which the heartbeats of a node that has left are refused

READY, STARTING, DRAINING, SILENT = "ready", "starting", "draining", "silent"

# Stores the record and the heartbeat of a node. KEYS: records, heartbeats, drains, and that its
# daemon has left; ARGV: node, record. Returns whether the node has been requested to leave.
# A heartbeat that was sent into a dead network arrives when it is back, perhaps after the end of
# the daemon: the system sends it again although its connection is closed.
_BEAT = """
if redis.call('EXISTS', KEYS[4]) == 1 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], redis.call('TIME')[1], ARGV[1])
return redis.call('HEXISTS', KEYS[3], ARGV[1])
"""


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """What a node reports about itself. A field that a later version adds needs a default."""

    machine: str
    version: str  # of warmd
    schema: int  # latest format of run directories that it reads
    labels: Mapping[str, str]
    queues: Mapping[str, int]  # queue -> jobs at a time; empty for a gateway alone
    pid: int  # of the supervisor
    home: str
    state: str  # READY, STARTING or DRAINING
    jobs: list[str]  # held by its workers
    jobs_taken: int  # since it was started


@dataclass(frozen=True, kw_only=True)
class Node(NodeRecord):
    """A node as others see it; `state` may also be SILENT."""

    name: str
    heartbeat: float  # unix seconds
    silent_s: float  # since then
    is_draining: bool  # `nodes --drain` has requested that it leaves
    is_leader: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class NodeRegistry:
    """All nodes of one Redis."""

    def __init__(self, connection: redis.Redis) -> None:
        self._connection = connection

    def beat(self, name: str, record: NodeRecord, *, run: str = "") -> bool:
        """Store a heartbeat; return whether the node has been requested to leave.

        `run`: an id of the daemon, unique to each of its starts.
        """
        all_keys = (keys.NODES, keys.NODE_BEATS, keys.NODE_DRAINS, keys.node_left(run))
        document: Any = orjson.dumps(record)
        return bool(self._connection.eval(_BEAT, len(all_keys), *all_keys, name, document))

    def leave(self, name: str, run: str) -> None:
        """Remove a node that leaves; its heartbeats that arrive later are refused."""
        self._connection.set(keys.node_left(run), 1, ex=_LATE_S)
        self.remove(name)

    def remove(self, *names: str) -> None:
        """Remove nodes that have left."""
        with self._connection.pipeline() as pipeline:
            pipeline.hdel(keys.NODES, *names)
            pipeline.zrem(keys.NODE_BEATS, *names)
            pipeline.hdel(keys.NODE_DRAINS, *names)
            pipeline.execute()

    def withdraw_drain(self, name: str) -> None:
        """Delete a request to leave, when the node starts again."""
        self._connection.hdel(keys.NODE_DRAINS, name)

    def request_drain(self, name: str) -> None:
        """Request that a node leaves: it reads this with its next heartbeat, also after a crash."""
        seconds, _ = self._time()
        self._connection.hset(keys.NODE_DRAINS, name, str(seconds))

    def all(self) -> list[Node]:
        """Return all nodes by name, silent ones too. Records that are not valid are left out."""
        now, _ = self._time()
        with self._connection.pipeline() as pipeline:
            pipeline.hgetall(keys.NODES)
            pipeline.zrange(keys.NODE_BEATS, 0, -1, withscores=True)
            pipeline.hkeys(keys.NODE_DRAINS)
            found, beats, drains = pipeline.execute()
        beat_of = {keys.text(name): at for name, at in beats}
        requested = {keys.text(name) for name in drains}
        first = leader(self._connection)
        nodes = []
        for raw_name, raw in found.items():
            name = keys.text(raw_name)
            if name not in beat_of:
                continue
            try:
                known = records.decode(raw, NodeRecord)
            except ValueError:
                continue
            silent_s = max(float(now) - beat_of[name], 0.0)
            if silent_s > LEASE_S:
                known = replace(known, state=SILENT)
            nodes.append(
                Node(
                    **known.__dict__,
                    name=name,
                    heartbeat=beat_of[name],
                    silent_s=silent_s,
                    is_draining=name in requested or known.state == DRAINING,
                    is_leader=name == first,
                )
            )
        return sorted(nodes, key=lambda node: node.name)

    def find(self, text: str) -> Node:
        """Return the node with a name or a unique prefix of it. Raises NotFound and SpecError."""
        nodes = self.all()
        found = [n for n in nodes if n.name == text] or [
            n for n in nodes if text and n.name.startswith(text)
        ]
        if len(found) == 1:
            return found[0]
        names = ", ".join(node.name for node in found or nodes) or "none"
        if found:
            raise SpecError("node", f"must name one node, got {text!r}: it may be {names}")
        raise NotFound(f"node: no node {text[:80]!r} here: there are {names}")

    def forget_old(self) -> None:
        """Remove nodes that were silent for a day."""
        now, _ = self._time()
        old: Any = self._connection.zrangebyscore(keys.NODE_BEATS, 0, now - _FORGOTTEN_S)
        if old:
            self.remove(*map(keys.text, old))

    def _time(self) -> tuple[int, int]:
        found: Any = self._connection.time()
        return int(found[0]), int(found[1])
