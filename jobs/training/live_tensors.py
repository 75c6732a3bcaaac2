"""Tensors that are written to disk while the training goes on, until it wants to change them.

Weights and moments rest from one update to the next: during all of the forward and backward work
in between they can be written from where they are. What is not written when the next update comes
is waited for when that is a matter of a moment, and put aside when it is not.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..context import Sink

PATIENCE_S = 0.5  # an update rather waits so long than to put anything aside
_PIECE_BYTES = 8 << 20  # read under one hold of the lock


class LiveTensors:
    """Reads memory of tensors for a writer in another thread.

    The writer reads through `sink`, and calls `end` when it has read everything or given up.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """`tensors`: on the CPU; all that the training will change."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self._parts = [
            _Part(address, storage) for address, storage in sorted(storages.items()) if address
        ]
        self._addresses = [part.address for part in self._parts]
        self._left = sum(len(part.memory) for part in self._parts)
        self._read = 0
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def sink(self, file: Sink) -> LiveSink:
        """Return a sink that writes to `file` what the tensors were when this was made."""
        return LiveSink(self, file)

    def end(self) -> None:
        """Say that nothing will be read any more."""
        self._ended.set()
        with self._lock:
            self._parts.clear()
            self._addresses.clear()

    def watched_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Return how many bytes of contiguous tensors are memory that this watches over."""
        with self._lock:
            return sum(
                tensor.numel() * tensor.element_size()
                for tensor in tensors
                if tensor.device.type == "cpu" and self._part_at(tensor.data_ptr()) is not None
            )

    def check_read(self, num_bytes: int) -> None:
        """Raise RuntimeError unless so many bytes were written from memory that this watches over.

        A library that hands over copies would have what it writes change under it, and the file
        would be torn with a checksum that is right.
        """
        if self._read != num_bytes:
            raise RuntimeError(
                f"{num_bytes:,} bytes of weights and optimizer were to be written from where they "
                f"are, and {self._read:,} were"
            )

    def release(self) -> None:
        """Return when the training may change the tensors."""
        if self._ended.is_set():
            return
        elapsed = time.monotonic() - self._began
        to_come_s = self._left * elapsed / self._read if self._read else float("inf")
        if to_come_s < PATIENCE_S and self._ended.wait(2 * PATIENCE_S):
            return
        with self._lock:
            for part in self._parts:
                part.copy()

    def write(self, file: Sink, data: NDArray[np.uint8]) -> None:
        """Write memory to `file`; where it is that of a tensor, as it was."""
        address = data.__array_interface__["data"][0]
        for begin in range(0, len(data), _PIECE_BYTES):
            piece = data[begin : begin + _PIECE_BYTES]
            with self._lock:
                part = self._part_at(address + begin)
                if part is None:
                    file.write(piece)
                    continue
                offset = address + begin - part.address
                file.write(part.memory[offset : offset + len(piece)])
                part.unread -= len(piece)
                self._read += len(piece)
                self._left -= len(piece)

    def _part_at(self, address: int) -> _Part | None:
        index = bisect.bisect_right(self._addresses, address) - 1
        if index < 0 or address >= self._addresses[index] + len(self._parts[index].memory):
            return None
        return self._parts[index]


class _Part:
    """The memory of a storage, or a copy of it."""

    def __init__(self, address: int, storage: torch.UntypedStorage) -> None:
        self.address = address
        self.unread = storage.nbytes()
        self.memory: NDArray[np.uint8] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()

    def copy(self) -> None:
        """Copy the memory, unless nobody will read it any more."""
        if self.unread > 0:
            # By torch: it copies with all threads.
            self.memory = torch.from_numpy(self.memory).clone().numpy()


class LiveSink:
    """A sink for `torch.save` and `write_safetensors` (jobs.context.Sink)."""

    def __init__(self, live: LiveTensors, file: Sink) -> None:
        self._live = live
        self._file = file

    def write(self, data: Any) -> int:
        """Append the bytes of a buffer."""
        part = np.frombuffer(data, np.uint8)
        self._live.write(self._file, part)
        return len(part)

    def flush(self) -> None:
        self._file.flush()
