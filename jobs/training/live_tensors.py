"""Copy-on-update: tensors are written to disk while training continues, until it changes them.

Weights and optimizer moments do not change between two updates, so they are written from where they
are during the forward and backward passes. The next update waits up to PATIENCE_S for the rest to
be written, then copies the remaining tensors.
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

PATIENCE_S = 0.5  # how long an update waits before tensors are copied
_PIECE_BYTES = 8 << 20  # read while holding the lock once


class LiveTensors:
    """Serves the memory of tensors to a writer in another thread.

    The writer reads through `sink`, and calls `end` when it has finished or failed.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """`tensors`: all CPU tensors that training changes."""
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
        """Return a sink that writes the tensors to `file` as they were at construction."""
        return LiveSink(self, file)

    def end(self) -> None:
        """Declare that nothing more will be read."""
        self._ended.set()
        with self._lock:
            self._parts.clear()
            self._addresses.clear()

    def watched_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Return how many bytes of contiguous tensors are in the watched memory."""
        with self._lock:
            return sum(
                tensor.numel() * tensor.element_size()
                for tensor in tensors
                if tensor.device.type == "cpu" and self._part_at(tensor.data_ptr()) is not None
            )

    def check_read(self, num_bytes: int) -> None:
        """Raise RuntimeError unless `num_bytes` were written from the watched memory.

        Guards against a library that writes other memory: training could change it during the
        write, and the torn file would have a valid checksum.
        """
        if self._read != num_bytes:
            raise RuntimeError(
                f"{num_bytes:,} bytes of weights and optimizer were to be written from where they "
                f"are, and {self._read:,} were"
            )

    def release(self) -> None:
        """Wait until training may change the tensors; copy those that are not written yet."""
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
        """Write memory to `file`; watched tensors as they were at construction."""
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
        """Copy the memory, unless it was read completely."""
        if self.unread > 0:
            # torch copies with all threads.
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
