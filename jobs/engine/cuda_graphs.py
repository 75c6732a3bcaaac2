"""CUDA graphs: computations that are captured once per shape and replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

_WARM_UPS = 2  # before a capture: libraries must not choose kernels or allocate during it


class Graphs:
    """Captures a computation at its first run, and replays it from then on.

    A graph reads and writes the memory of its capture: call `clear` when tensors are replaced. A
    capture is preceded by two runs, which must have no side effects. Nothing may read from the
    device.
    """

    def __init__(self) -> None:
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None  # memory pool, shared: graphs run one after another
        # A separate stream for these graphs: cuBLAS has a workspace per stream, which lives as long
        # as the first graph that was captured there (pytorch#193402).
        self._stream: Any = None

    def clear(self) -> None:
        """Drop all captured graphs."""
        self._captured.clear()
        self._pool = None

    def run(self, key: Hashable, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the result of `compute`, in memory that the next run overwrites."""
        if key not in self._captured:
            self._captured[key] = self._capture(compute)
        graph, result = self._captured[key]
        graph.replay()
        return result

    def _capture(
        self, compute: Callable[[], torch.Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile, for example to prepare another engine.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            result = compute()
        self._pool = graph.pool()
        return graph, result
