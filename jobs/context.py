"""What a job is handed: the only door between a job kind and the daemon.

Tests build one from a folder, a list and a threading.Event; the horse builds one from the
warm models and the run directory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class WarmModel:
    """A model with its tokenizer, ready to compute in this process."""

    name: str
    path: Path  # the local folder it was read from
    model: Any  # transformers.PreTrainedModel, in eval mode, no gradients
    tokenizer: Any  # transformers.PreTrainedTokenizerBase


class Models(Protocol):
    """The warm models, as a job sees them."""

    def take(self, name: str) -> WarmModel:
        """Return the warm model of that name, the caller's own to change. Raises NotFound."""


class Checkpoints(Protocol):
    """The checkpoints of one job: committed whole or not at all."""

    def latest(self) -> Path | None:
        """Return the newest whole checkpoint (a folder `checkpoint-N`), or None."""

    def commit(self, step: int) -> AbstractContextManager[Path]:
        """Give an empty folder to write into; leaving the block makes it `checkpoint-{step}`.

        An exception inside the block leaves no trace. Old ones are pruned after the commit.
        """


class Emit(Protocol):
    """Record an event of this job."""

    def __call__(self, type: str, /, *, step: int | None = None, **fields: Any) -> None:
        """`type` is one word; `fields` are plain JSON values (NaN becomes null)."""


class StopRequest(Protocol):
    """The one thing that flows towards a running job (a threading.Event will do)."""

    def is_set(self) -> bool:
        """Whether the job should save its state and raise Stopped at the next step's end."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """The surroundings of one execution of a job."""

    job_id: str
    run_dir: Path
    device: str  # a torch device: "cpu", "cuda:0"
    models: Models
    checkpoints: Checkpoints
    emit: Emit
    stop: StopRequest

    @property
    def cache_dir(self) -> Path:
        """What jobs make once for all, such as tokenised data: HOME/cache. May not exist."""
        return self.run_dir.parent.parent / "cache"
