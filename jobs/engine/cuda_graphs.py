"""What a GPU is told once and then repeats: CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

_WARM_UPS = 2  # before a capture, in which no library may choose or allocate for the first time


class Graphs:
    """Computations without a number that comes from the device, each captured the first time.

    What is captured reads and writes the memory that it found then: who gives it other tensors has
    to `clear`. It computes twice more before: that must change nothing.
    """

    def __init__(self) -> None:
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None  # of memory, for all of them: they run one after the other

    def clear(self) -> None:
        """Forget what was captured."""
        self._captured.clear()
        self._pool = None

    def run(self, key: Hashable, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what `compute` returns, in memory that the next run overwrites."""
        if key not in self._captured:
            self._captured[key] = self._capture(compute)
        graph, result = self._captured[key]
        graph.replay()
        return result

    def _capture(
        self, compute: Callable[[], torch.Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                compute()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile, as one that prepares another engine does.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()
        self._pool = graph.pool()
        return graph, result
