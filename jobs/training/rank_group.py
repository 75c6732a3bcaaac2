"""One rank of the processes of a job: what all ways of communication between them share.

Values go from rank to rank as JSON, never as pickles: whoever could write to a connection would run
code in the job.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar, cast

T = TypeVar("T")


class RankGroup(ABC):
    """One rank of a group of processes (jobs.context.Ranks), over the `_exchange` of a subclass."""

    def __init__(
        self, rank: int, size: int, per_node: int, *, host: str, port: int | None = None
    ) -> None:
        """`per_node`: the number of ranks on each machine, with consecutive numbers.

        `host`, `port`: the address of rank 0, and the port of its TCPStore if it serves one.
        """
        self.rank = rank
        self.size = size
        self._per_node = per_node
        # The variables of torchrun.
        self.environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
            "GROUP_RANK": str(rank // per_node),
            "MASTER_ADDR": host,
        }
        if port is not None:
            # Makes `init_process_group` use the store of rank 0 instead of serving another one.
            self.environment |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def from_first(self, make: Callable[[], T]) -> T:
        content = _encode(make()) if self.rank == 0 else b""
        return cast(T, json.loads(self._exchange(content)[0]))

    def after_first(self, make: Callable[[], T]) -> T:
        # The first rank of each other machine makes its own: files such as caches may be local.
        own_round, last_round = self._rounds()
        for _ in range(own_round):
            self._exchange(b"")
        made = make()
        for _ in range(last_round - own_round):
            self._exchange(b"")
        return made

    def _rounds(self) -> tuple[int, int]:
        """Return the round in which this rank calls `make` in `after_first`, and the last round."""
        last_round = 2 if 1 < self._per_node < self.size else 1
        if self.rank == 0:
            return 0, last_round
        return (1 if self.rank % self._per_node == 0 else last_round), last_round

    def gather(self, value: T) -> list[T]:
        return [json.loads(content) for content in self._exchange(_encode(value))]

    @abstractmethod
    def sum(self, tensor: Any) -> None:
        """As in Ranks."""

    @abstractmethod
    def close(self) -> None:
        """End the connections, also in processes that have inherited them from this one."""

    @abstractmethod
    def _exchange(self, content: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in their order."""


def _encode(value: Any) -> bytes:
    # Python's json: floats are exact, and NaN and infinity stay what they are.
    return json.dumps(value, separators=(",", ":")).encode()
