"""Communication between the ranks of one machine: inherited sockets and shared memory.

Nothing here has a name or an address, so only processes forked by the job's horse can take part.
Each rank has a slot of the shared memory. A sum goes through it in chunks: every rank copies its
values into its slot, adds its part of the chunk over all slots, and copies the whole result.
Imports torch.
"""

from __future__ import annotations

import mmap
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NoReturn

import torch
from torch import Tensor

from .rank_group import RankGroup

CHUNK_BYTES = 2 << 20  # of a tensor that are summed at once: the slots of all ranks fit the caches
_SEGMENT_BYTES = 1 << 20  # of gloo
_LENGTH = 8  # bytes of the length of a part in a message


class LocalChannels:
    """The sockets and the memory of a group; created before its ranks are forked."""

    def __init__(self, size: int) -> None:
        self.size = size
        # A slot for each rank, and the result. It is freed with the last process that maps it.
        self.memory = mmap.mmap(-1, (size + 1) * CHUNK_BYTES)
        self._pairs = [socket.socketpair() for _ in range(1, size)]

    def take(self, rank: int) -> list[socket.socket]:
        """Return the sockets of a rank, and close all others in this process.

        Rank 0 has one to each other rank; each other rank has one to rank 0.
        """
        taken = []
        for other, (first, second) in enumerate(self._pairs, 1):
            own, foreign = (first, second) if rank == 0 else (second, first)
            foreign.close()
            if rank in (0, other):
                taken.append(own)
            else:
                own.close()
        return taken


class LocalGroup(RankGroup):
    """One rank of the processes of a job on one machine.

    `on_broken` is called when another rank has closed its connections, with the error.
    """

    def __init__(
        self, channels: LocalChannels, rank: int, on_broken: Callable[[Exception], NoReturn]
    ) -> None:
        """Wait for the other ranks."""
        super().__init__(rank, channels.size, per_node=channels.size, host="127.0.0.1")
        self._on_broken = on_broken
        self._sockets = channels.take(rank)
        memory = torch.frombuffer(channels.memory, dtype=torch.uint8)
        *self._slots, self._result = memory.view(channels.size + 1, CHUNK_BYTES)
        self._wait_for_all()

    @torch.no_grad()
    def sum(self, tensor: Tensor) -> None:
        values = tensor.view(-1)
        slots = [slot.view(tensor.dtype) for slot in self._slots]
        result = self._result.view(tensor.dtype)
        most = len(result)
        for begin in range(0, len(values), most):
            chunk = values[begin : begin + most]
            count = len(chunk)
            slots[self.rank][:count].copy_(chunk)
            self._wait_for_all()
            start, stop = (count * number // self.size for number in (self.rank, self.rank + 1))
            for part, order in _orders(begin + start, begin + stop, len(values), tensor, self.size):
                at = slice(part.start - begin, part.stop - begin)
                first, second, *others = (slots[rank][at] for rank in order)
                torch.add(first, second, out=result[at])
                for other in others:
                    result[at].add_(other)
            self._wait_for_all()
            chunk.copy_(result[:count])

    def close(self) -> None:
        for one in self._sockets:
            with suppress(OSError):  # the other end is closed
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _wait_for_all(self) -> None:
        self._exchange(b"")

    def _exchange(self, content: bytes) -> list[bytes]:
        try:
            if self.rank == 0:
                parts = [content, *self._receive_from_all()]
                for one in self._sockets:
                    _send(one, parts)
                return parts
            _send(self._sockets[0], [content])
            return _receive(self._sockets[0], self.size)
        except OSError as error:
            self._on_broken(error)

    def _receive_from_all(self) -> list[bytes]:
        """Return the parts of the other ranks; whichever comes, or breaks, first is read first."""
        ready = select.poll()
        waiting = {one.fileno(): number for number, one in enumerate(self._sockets)}
        for descriptor in waiting:
            ready.register(descriptor, select.POLLIN)
        parts = [b""] * len(waiting)
        while waiting:
            for descriptor, _ in ready.poll():
                ready.unregister(descriptor)
                number = waiting.pop(descriptor)
                [parts[number]] = _receive(self._sockets[number], 1)
        return parts


def _orders(
    start: int, stop: int, count: int, tensor: Tensor, size: int
) -> Iterator[tuple[slice, Sequence[int]]]:
    """Divide items `start` to `stop` of `count` by the order in which the ranks' values are added.

    The order is that of gloo's ring, in which jobs of several nodes are summed, too: sums of three
    or more numbers depend on it. The ring divides a tensor into a part for each rank, which begins
    at the rank before and goes around, down to the rank itself.
    """
    item = tensor.element_size()
    segments = max(-(-count * item // _SEGMENT_BYTES), 2 * size)
    per_rank = -(-segments // size)
    items = -(-count // (per_rank * size)) * per_rank
    while start < stop:
        rank = start // items
        end = min(stop, (rank + 1) * items)
        yield slice(start, end), [(rank - 1 - step) % size for step in range(size)]
        start = end


def _send(connection: socket.socket, parts: Sequence[bytes]) -> None:
    lengths = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    connection.sendall(b"".join([lengths, *parts]))


def _receive(connection: socket.socket, count: int) -> list[bytes]:
    """Return the `count` parts of a message. Raises OSError."""
    lengths = struct.unpack(f"<{count}Q", _read(connection, count * _LENGTH))
    return [_read(connection, length) for length in lengths]


def _read(connection: socket.socket, length: int) -> bytes:
    content = bytearray(length)
    rest = memoryview(content)
    while rest:
        received = connection.recv_into(rest)
        if not received:
            raise ConnectionResetError("connection closed by another rank")
        rest = rest[received:]
    return bytes(content)
