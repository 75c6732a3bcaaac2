"""The clock of a trainer that is being measured. Imports transformers."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback


class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Notes what each step takes."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.processor_s: list[float] = []
        self._began = 0.0, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began[0])
        self.processor_s.append(time.process_time() - self._began[1])
