"""Both sides of a kind, as `rows` and `groups` prepare them. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import LoraConfig

from ..context import Context, WarmModel
from ..models.adapters import is_adapter
from ..training.loop import Training


@dataclass(frozen=True)
class Stock:
    """What TRL's trainer of a kind is made of.

    `folder`: an empty one. `model`: in float32, not yet with an adapter; `lora`: that adapter's
    config, None without one.
    """

    ctx: Context
    folder: Path
    warm: WarmModel
    model: Any
    lora: LoraConfig | None


@dataclass(frozen=True)
class Sides:
    """Both sides of a kind; TRL's is made after warmd's has trained, from what that has used.

    `most_steps`: of those that both sides can train on the same rows.
    """

    training: Training
    trainer: Callable[[Stock], Any]
    most_steps: int


Prepare = Callable[[Any, Context, WarmModel, ExitStack], Sides]


class Recorder:
    """A task whose batches are kept (training.loop.Task)."""

    def __init__(self, task: Any) -> None:
        self.batches_taken: list[Sequence[Any]] = []
        self._task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def batches(self, first_step: int) -> Iterator[Sequence[Any]]:
        for batch in self._task.batches(first_step):
            self.batches_taken.append(batch)
            yield batch


def reference_folder(stock: Stock) -> str:
    """Return a folder from which TRL can read the initial weights: those of an adapter merged."""
    if not is_adapter(stock.warm.path):
        return str(stock.warm.path)
    folder = stock.folder / "reference"
    stock.model.save_pretrained(folder)
    return str(folder)
