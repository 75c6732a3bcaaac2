"""What a job is handed: the only door between a job kind and the daemon.

Tests build one from a folder, a list and a threading.Event; the horse builds one from the
warm models and the run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

MANIFEST = "manifest.json"  # of a checkpoint: the one file in it that is not its job's


@dataclass(frozen=True, kw_only=True)
class WarmModel:
    """A model with its tokenizer, ready to compute in this process."""

    name: str
    path: Path  # the local folder it was read from
    model: Any  # transformers.PreTrainedModel, in eval mode, no gradients
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    precision: str = "native"  # of answers, unless a job says otherwise
    may_pack: bool = True  # whether the memory budget has room for a packed copy of the weights


class Models(Protocol):
    """The warm models, as a job sees them."""

    def take(self, name: str) -> WarmModel:
        """Return the warm model of that name, on the job's device. Raises NotFound.

        A training's own to change; one that other jobs have, too, for the kinds that only read.
        """


class Saved(Protocol):
    """How a save ended."""

    @property
    def path(self) -> Path:
        """The folder of the checkpoint."""

    @property
    def seconds(self) -> float:
        """How long it took, most of it beside the training."""

    @property
    def size_bytes(self) -> int:
        """What the checkpoint takes on disk."""

    @property
    def error(self) -> str | None:
        """Why there is no new checkpoint; None when there is one."""


class Save(Protocol):
    """A save in flight."""

    @property
    def step(self) -> int:
        """The step whose checkpoint it is."""

    def outcome(self, *, patience_s: float | None = 0) -> Saved | None:
        """Return how the save ended, or None when it has not so soon; with None, wait for it."""


class Sink(Protocol):
    """A file that is written from its beginning to its end; leaving its block closes it."""

    def write(self, data: Any, /) -> int:
        """Append the bytes of a buffer; they are copied before this returns."""

    def flush(self) -> None:
        """For libraries that take a file."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None: ...


class Staging(Protocol):
    """The folder of a checkpoint that is being filled."""

    @property
    def path(self) -> Path:
        """The folder, for small files to be written into."""

    def open(self, name: str) -> Sink:
        """Open a new file for much data."""


class Checkpoints(Protocol):
    """The checkpoints of one job: committed whole or not at all."""

    def latest(self) -> Path | None:
        """Return the newest whole checkpoint (a folder `checkpoint-N`), or None."""

    def save(
        self,
        step: int,
        prepare: Callable[[Any], Callable[[], None]],
        *,
        about: Mapping[str, Any],
    ) -> Save:
        """Commit a checkpoint beside what the caller goes on to do.

        `prepare` is called at once with the Staging, for what must be written now; what it returns
        is called in a thread of its own, for what takes time. `about` is kept with the checkpoint:
        plain JSON values, among them `metrics`. An error in the thread leaves no trace but the
        outcome's.
        """

    def about(self, checkpoint: Path) -> dict[str, Any]:
        """Return what was given with a checkpoint when it was committed."""


class Emit(Protocol):
    """Record an event of this job."""

    def __call__(self, type: str, /, *, step: int | None = None, **fields: Any) -> None:
        """`type` is one word; `fields` are plain JSON values (NaN becomes null)."""


class Request(Protocol):
    """What flows towards a running job (a threading.Event will do)."""

    def is_set(self) -> bool:
        """Whether it is asked for now."""


class Never:
    """A request that nobody makes."""

    def is_set(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What a job does now, and how long it may do so before it counts as stalled."""

    name: str  # a noun: step, evaluation
    began: float  # by the monotonic clock; later by what was timed apart since
    limit_s: float
    median_s: float | None  # of the latest ones of its kind; None: of too few to judge by
    ends_job: bool = False  # whether a stall is to end the job


def _ignore(activity: Activity | None) -> None:
    """Nobody watches over this job."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """The surroundings of one execution of a job."""

    job_id: str
    run_dir: Path
    device: str  # a torch device: "cpu", "cuda:0"
    models: Models
    checkpoints: Checkpoints
    emit: Emit
    stop: Request  # to save the state and raise Stopped at the next step's end
    pause: Request = field(
        default_factory=Never
    )  # to wait at the next step's end, keeping everything in memory
    working: Callable[[Activity | None], None] = _ignore  # None: nothing is expected to happen
    stop_at: int | None = None  # the step to stop at unasked
    queued_s: float | None = None  # how long the job has waited for this execution

    @property
    def cache_dir(self) -> Path:
        """What jobs make once for all, such as tokenised data: HOME/cache. May not exist."""
        return self.run_dir.parent.parent / "cache"
