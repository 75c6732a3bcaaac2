"""Copies of GPU tensors for a checkpoint: fast on the device, then to the host while training runs.

A copy to the host takes seconds for a model of 0.5B, one on the device milliseconds. So training
waits only for the copy on the device. The thread that writes the checkpoint reads that copy through
a pinned buffer on a CUDA stream of its own, so the kernels of the training do not queue behind it.
Imports torch.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..compute.device import free_bytes

_PIECE_BYTES = 64 << 20
_ROOM = 1.5  # free memory, in multiples of the copies, for which they are made on the device


def held(state: Any) -> Any:
    """Return the state with GPU tensors copied, on the device if there is room; CPU tensors stay.

    Training may change the originals after this.
    """
    on_device = [
        leaf
        for leaf in tree_leaves(state)
        if isinstance(leaf, Tensor) and leaf.device.type != "cpu"
    ]
    if not on_device:
        return state
    needed = _ROOM * sum(tensor.nbytes for tensor in on_device)
    has_room = free_bytes(on_device[0].device) >= needed

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device.type == "cpu":
            return leaf
        return leaf.detach().clone() if has_room else leaf.detach().cpu()

    return tree_map(copied, state)


class HostReader:
    """Reads tensors of one device into host memory, piece by piece through a pinned buffer."""

    def __init__(self, device: torch.device) -> None:
        """Called in the thread that made the tensors: reads wait for the work it has queued."""
        self._is_gpu = device.type == "cuda"
        self._buffer = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=self._is_gpu)
        self._stream: Any = None
        if self._is_gpu:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def read(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in host memory."""
        copy = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        source, target = (t.reshape(-1).view(torch.uint8) for t in (tensor, copy))
        with torch.cuda.stream(self._stream) if self._is_gpu else nullcontext():
            for begin in range(0, len(source), _PIECE_BYTES):
                piece = source[begin : begin + _PIECE_BYTES]
                self._buffer[: len(piece)].copy_(piece, non_blocking=True)
                if self._is_gpu:
                    self._stream.synchronize()
                target[begin : begin + len(piece)] = self._buffer[: len(piece)]
        return copy


def on_host(state: Any, reader: HostReader | None) -> Any:
    """Return the state with GPU tensors read into host memory; CPU tensors are not copied."""

    def read(leaf: Any) -> Any:
        if reader is None or not isinstance(leaf, Tensor) or leaf.device.type == "cpu":
            return leaf
        return reader.read(leaf)

    return tree_map(read, state)
