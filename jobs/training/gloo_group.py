"""Communication between the processes of a job on several nodes: a gloo process group.

It has no connection to torch's global group: the libraries of a rank (transformers, accelerate,
TRL) must not know about the others, or they would divide batches and wrap the model. What it sends
is not encrypted: the network between nodes must be private. Imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch
import torch.distributed as distributed
from torch import Tensor

from .rank_group import RankGroup
from .rank_proofs import prove

T = TypeVar("T")

# A rank may wait for rank 0 through an evaluation or a pause. The death of a rank ends the wait: it
# closes its connections. So does a machine that cannot be reached (_end_with_the_network).
_NO_TIMEOUT = timedelta(days=10_000)

# For which another machine may be unreachable. Longer than the lease of a worker: a machine that
# has lost Redis, too, is reported as lost.
UNREACHABLE_S = 20

# For a rank to prove itself once it is connected: milliseconds unless it is suspended. Longer than
# UNREACHABLE_S, so that a machine that was lost meanwhile is reported as that.
_PROOF_S = 30.0


class Rendezvous(Protocol):
    """How the ranks of a group find each other."""

    @property
    def address(self) -> str:
        """The address at which the ranks of this machine listen."""

    @property
    def host(self) -> str:
        """The address of rank 0."""

    @property
    def port(self) -> int:
        """The port of the TCPStore of rank 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def per_node(self) -> int:
        """The number of ranks on each machine; with consecutive numbers."""

    @property
    def secret(self) -> str:
        """What the ranks of this execution know, and nobody else."""

    def store(self, rank: int) -> Any:
        """Return the torch.distributed.Store of a rank. Raises RuntimeError and OSError."""


class GlooGroup(RankGroup):
    """One rank of the processes of a job on several nodes.

    `on_broken` is called when another rank has closed its connections, with the error; with a
    TimeoutError when one that is connected has not proved itself, which only this rank may know.
    """

    def __init__(
        self, rendezvous: Rendezvous, rank: int, on_broken: Callable[[Exception], NoReturn]
    ) -> None:
        """Wait for the other ranks. Raises JobFailed if another program connects as one of them."""
        size = rendezvous.size
        super().__init__(
            rank, size, rendezvous.per_node, host=rendezvous.host, port=rendezvous.port
        )
        self._on_broken = on_broken
        gloo = cast(Any, distributed).ProcessGroupGloo
        options = gloo._Options()
        # The default is the interface of the host's name, which others can reach.
        options._devices = [gloo.create_device(hostname=rendezvous.address)]
        options._timeout = _NO_TIMEOUT
        known = _sockets()
        # The store of rank 0 serves others, and code of users, for as long as it is referred to.
        self._store = self._call(lambda: rendezvous.store(rank))
        self._group = self._call(lambda: gloo(self._store, rank, size, options))
        self._connections = _sockets() - known
        _end_with_the_network(self._connections)
        self._call(lambda: prove(self._group, rank, size, rendezvous.secret, limit_s=_PROOF_S))

    def sum(self, tensor: Tensor) -> None:
        self._call(lambda: self._group.allreduce([tensor]).wait())

    def close(self) -> None:
        for connection in _open(self._connections & _sockets()):
            with contextlib.suppress(OSError):  # the other end is closed, or it listens
                connection.shutdown(socket.SHUT_RDWR)

    def _exchange(self, content: bytes) -> list[bytes]:
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(content)
        self.sum(lengths)
        # Padded to one length: gloo cannot gather different lengths.
        padded = torch.zeros(max(int(lengths.max()), 1), dtype=torch.uint8)
        padded[: len(content)] = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)[
            : len(content)
        ]
        found = [torch.empty_like(padded) for _ in range(self.size)]
        self._call(lambda: self._group.allgather([found], [padded]).wait())
        return [
            part[:length].numpy().tobytes()
            for part, length in zip(found, lengths.tolist(), strict=True)
        ]

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (RuntimeError, TimeoutError) as error:  # gloo's: connection closed by peer
            self._on_broken(error)


def is_unreachable(error: Exception) -> bool:
    """Whether connections have broken because a machine could not be reached, not by an end there.

    gloo's errors have the system's message only.
    """
    messages = (os.strerror(code) for code in (errno.ETIMEDOUT, errno.EHOSTUNREACH))
    return any(message in str(error) for message in messages)


def _sockets() -> set[tuple[int, int]]:
    """The sockets of this process: descriptor and inode."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            about = os.fstat(int(name))
            if stat.S_ISSOCK(about.st_mode):
                found.add((int(name), about.st_ino))
    return found


def _end_with_the_network(sockets: set[tuple[int, int]]) -> None:
    """Make connections break when the other machine is unreachable for `UNREACHABLE_S`.

    By default the system waits for about 15 minutes, and forever where nothing is to be sent. It
    is the other system that answers, so ranks that compute, wait or are suspended are not affected.
    """
    for connection in _open(sockets):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, UNREACHABLE_S // 2),
            (socket.TCP_KEEPINTVL, 2),
            (socket.TCP_KEEPCNT, UNREACHABLE_S // 4),
            (socket.TCP_USER_TIMEOUT, UNREACHABLE_S * 1000),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _open(sockets: set[tuple[int, int]]) -> Iterator[socket.socket]:
    """Iterate over the TCP sockets among these, which are gloo's and stay open."""
    for descriptor, _ in sockets:
        connection = socket.socket(fileno=descriptor)
        try:
            if connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX:
                yield connection
        finally:
            connection.detach()
