"""Copies warm weights to a GPU through pinned buffers, with several threads.

The weights lie in mapped files, that is in pageable memory: the driver copies them piece by piece
through a buffer of its own, with one thread, which also takes the page faults (3 to 10 GB/s). Here
several threads fill pinned buffers, and the GPU reads one buffer while the next one is filled.
Imports torch.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PIECE_BYTES = 64 << 20


def copy_to(device: torch.device, tensors: Sequence[Tensor], *, num_threads: int) -> list[Tensor]:
    """Return contiguous copies of CPU tensors on a device, complete when this returns."""
    copies = [
        torch.empty_like(tensor, device=device, memory_format=torch.contiguous_format)
        for tensor in tensors
    ]
    if device.type == "cuda":  # the memory may still be in use by kernels of this stream
        torch.cuda.current_stream(device).synchronize()
    pieces: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
    for tensor, copy in zip(tensors, copies, strict=True):
        for piece in _pieces(tensor, copy):
            pieces.put(piece)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="copy") as pool:
        for done in [pool.submit(_copy_all, pieces, device) for _ in range(num_threads)]:
            done.result()
    return copies


@dataclass(frozen=True)
class _Piece:
    """A range of a tensor's bytes, and its place on the device."""

    source: Tensor  # both uint8, one-dimensional
    target: Tensor


def _pieces(tensor: Tensor, copy: Tensor) -> Iterator[_Piece]:
    source, target = (t.reshape(-1).view(torch.uint8) for t in (tensor.detach(), copy))
    for begin in range(0, len(source), _PIECE_BYTES):
        end = begin + _PIECE_BYTES
        yield _Piece(source[begin:end], target[begin:end])


def _copy_all(pieces: queue.SimpleQueue[_Piece], device: torch.device) -> None:
    """Copy pieces until none is left; runs in several threads."""
    buffers = [_Buffer(device), _Buffer(device)]
    is_gpu = device.type == "cuda"
    stream: Any = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream) if is_gpu else nullcontext():
        while True:
            try:
                piece = pieces.get_nowait()
            except queue.Empty:
                break
            buffers.reverse()
            buffers[0].send(piece)
    for buffer in buffers:
        buffer.wait()


class _Buffer:
    """A pinned buffer, and the copy from it that may still run."""

    def __init__(self, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._memory = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=is_gpu)
        self._is_read: Any = torch.cuda.Event() if is_gpu else None  # type: ignore[no-untyped-call]

    def send(self, piece: _Piece) -> None:
        """Start the copy of a piece, once the one before it has left the buffer."""
        self.wait()
        filled = self._memory[: len(piece.source)]
        filled.copy_(piece.source)
        piece.target.copy_(filled, non_blocking=True)
        if self._is_read is not None:
            self._is_read.record()

    def wait(self) -> None:
        if self._is_read is not None:
            self._is_read.synchronize()
