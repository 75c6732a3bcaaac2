"""Communication between the processes of one job, over the loopback interface.

A gloo process group of its own, without torch's global one: the libraries of a rank (transformers,
accelerate, TRL) must not know about the others, or they would divide batches and wrap the model.
Imports torch.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as distributed
from torch import Tensor

T = TypeVar("T")

# A rank may wait for rank 0 through an evaluation or a pause. The death of a rank ends the wait: it
# closes its connections.
_NO_TIMEOUT = timedelta(days=10_000)


class ProcessGroup:
    """One rank of a group of processes (jobs.context.Ranks).

    `folder`: used only by these processes, for their rendezvous. `on_broken` is called when another
    rank has closed its connections, with the error.
    """

    def __init__(
        self, folder: Path, rank: int, size: int, on_broken: Callable[[Exception], NoReturn]
    ) -> None:
        """Wait for the other ranks."""
        self.rank = rank
        self.size = size
        self._on_broken = on_broken
        gloo = cast(Any, distributed).ProcessGroupGloo
        options = gloo._Options()
        # The default is the interface of the host's name, which others can reach.
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = _NO_TIMEOUT
        store = cast(Any, distributed).FileStore(str(folder / "rendezvous"), size)
        self._group = self._call(lambda: gloo(store, rank, size, options))
        self.gather(None)  # after this, every process is connected to every other

    def from_first(self, make: Callable[[], T]) -> T:
        content = pickle.dumps(make()) if self.rank == 0 else b""
        return cast(T, pickle.loads(self._exchange(content)[0]))

    def after_first(self, make: Callable[[], T]) -> T:
        if self.rank > 0:
            self._exchange(b"")
        made = make()
        if self.rank == 0:
            self._exchange(b"")
        return made

    def gather(self, value: T) -> list[T]:
        return [pickle.loads(content) for content in self._exchange(pickle.dumps(value))]

    def sum(self, tensor: Tensor) -> None:
        self._call(lambda: self._group.allreduce([tensor]).wait())

    def _exchange(self, content: bytes) -> list[bytes]:
        """Return the bytes of all ranks. They are this job's own processes: pickle is safe."""
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
        except RuntimeError as error:  # gloo's: connection closed by peer
            self._on_broken(error)
