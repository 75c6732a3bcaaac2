"""The warm models on the device of a horse.

The zygote's weights stay on the CPU, mapped from their files; the horse copies them to its GPU.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any

from ...jobs.context import WarmModel


class Placement:
    """Brings warm models to the device of this process."""

    def __init__(self, device: str, *, problem: str | None = None, copy_threads: int = 0) -> None:
        """`problem`: why the device is not the requested GPU.

        `copy_threads`: threads that copy weights through pinned buffers; 0: torch copies them.
        """
        self.device = device
        self.problem = problem
        self._copy_threads = copy_threads
        self._lock = threading.Lock()  # concurrent jobs request the same model
        self._shared: dict[int, tuple[WarmModel, WarmModel]] = {}  # each with its source

    def shared(self, warm: WarmModel) -> WarmModel:
        """Return a model for all jobs of this process; on the CPU the warm one itself."""
        if self.device == "cpu":
            return warm
        with self._lock:
            if id(warm) not in self._shared:
                model = copy.deepcopy(warm.model, self._weights(warm.model))
                self._shared[id(warm)] = warm, replace(warm, model=model)
            return self._shared[id(warm)][1]

    def copied(self, warm: WarmModel) -> WarmModel:
        """Return a model for one job, which may change it."""
        if self.device == "cpu":
            return copy.deepcopy(warm)
        return copy.deepcopy(warm, self._weights(warm.model))

    def _weights(self, model: Any) -> dict[int, Any]:
        """Return the weights on the device, by those on the CPU: a memo for the copy of a model.

        They are copied directly from the mapped files, without a copy on the CPU. Tied weights,
        such as those of a tied head, stay tied.
        """
        import torch

        weights = [*model.parameters(), *model.buffers()]
        moved: dict[int, Any] = {}
        for weight, copied in zip(weights, self._copies(weights), strict=True):
            there = copied
            if isinstance(weight, torch.nn.Parameter):
                there = torch.nn.Parameter(copied, requires_grad=weight.requires_grad)
            moved[id(weight)] = there
        return moved

    def _copies(self, weights: list[Any]) -> list[Any]:
        import torch

        if self._copy_threads == 0:
            return [weight.detach().to(self.device, non_blocking=True) for weight in weights]
        from .pinned_copies import copy_to

        return copy_to(torch.device(self.device), weights, num_threads=self._copy_threads)
