"""How the ranks of a job on several nodes find each other.

It is the rendezvous of torchrun: rank 0 serves a TCPStore, at which all ranks leave the addresses
where they listen. gloo and the store have no authentication, so they listen only at the address
that the operator has set (gang_address), and ranks prove to each other that they know the secret of
this execution (jobs/training/rank_proofs.py). The keys have a prefix that depends on the secret: a
rank of an earlier execution cannot take part by accident.

Imports torch in functions only.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from ...jobs.errors import JobFailed
from ..host.messages import GangPlan

_CONNECT_TIMEOUT = timedelta(seconds=60)  # to rank 0, which listens already


class Rendezvous:
    """The rendezvous of the ranks of several machines, as seen by one of them."""

    def __init__(self, plan: GangPlan, per_node: int) -> None:
        """Listen, if this is the machine of rank 0. Raises JobFailed."""
        self.address = plan.address
        self.per_node = per_node
        self.size = per_node * len(plan.nodes)
        self.first_rank = per_node * plan.node
        self.host, self.port = plan.host, plan.port
        self.secret = plan.secret
        self._listener: socket.socket | None = None
        if plan.node == 0:
            self._listener = _listen(plan.address)
            self.host, self.port = plan.address, self._listener.getsockname()[1]

    def store(self, rank: int) -> Any:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        from ...jobs.training.rank_proofs import SignedStore, proof

        # The store of rank 0 owns the descriptor; other ranks have inherited a copy.
        listener, self._listener = self._listener, None
        served: dict[str, Any] = {}
        if rank == 0:
            assert listener is not None
            served = {"master_listen_fd": listener.detach()}
        elif listener is not None:
            listener.close()
        store = TCPStore(
            self.host,
            self.port,
            is_master=rank == 0,
            wait_for_workers=False,
            timeout=_CONNECT_TIMEOUT,
            **served,
        )
        prefix = proof(self.secret, "prefix").hex()
        return SignedStore(PrefixStore(prefix, store), self.secret)

    def close(self) -> None:
        """Called when all ranks are connected, and at the end; the store continues to serve."""
        if self._listener is not None:
            self._listener.close()


def _listen(address: str) -> socket.socket:
    """Listen at a free port of an address only. Raises JobFailed."""
    try:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, 0), family=family)
    except OSError as error:
        raise JobFailed(
            f"gang_address: must be an address of this machine, got {address}: {error}"
        ) from error
