"""The context of a running job: the only interface between a job kind and the daemon.

The horse builds a Context from the warm models and the run directory; tests build one from a
folder, a list and a threading.Event.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar, Protocol, Self, TypeVar

from .errors import Stopped

T = TypeVar("T")

# Version of the rules by which jobs compute. spec.json has the version at submission, which decides
# how steps are planned; a checkpoint has the version that wrote it.
# 0: the steps of SFT and DPO were planned before rows without tokens to learn were dropped.
# 1: `eval` counted completions that no reward scores as 0; gates of curricula were decided by the
#    exact McNemar test or the bootstrap, each comparison at 5 %; SFT and DPO trained models that
#    cannot be packed by TRL's forward pass.
# 2: GRPO drew all random numbers of completions, replay and the order within a step from torch's
#    generator; it trained models that cannot be packed by TRL's forward pass.
RULES = 3

MANIFEST = "manifest.json"  # in a checkpoint: the one file that the job did not write
_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d{1,15})")


def checkpoint_name(step: int) -> str:
    """Return the name of the folder that holds the checkpoint of a step."""
    return f"checkpoint-{step}"


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint's folder; -1 if it is not a checkpoint's name."""
    match = _CHECKPOINT_NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


@dataclass(frozen=True, kw_only=True)
class WarmModel:
    """A model with its tokenizer, ready to compute in this process."""

    name: str
    path: Path  # the local folder that it was loaded from
    model: Any  # transformers.PreTrainedModel, in eval mode, no gradients
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    precision: str = "native"  # of the computation, unless a job sets another
    may_pack: bool = True  # whether a packed copy of the weights fits the memory budget
    weights: str | None = None  # digest of all files that it was read from; None: not known
    # engine.low_rank.Adapter of an adapter that is served unmerged: `model` is its base then, which
    # others share. Only kinds with Spec.takes_adapters get one.
    adapter: Any = None
    weights_digest: str | None = None  # of the weight files alone; None: not known
    new_head: tuple[str, ...] = ()  # tensors of a head that the files lack: random values
    left_out: tuple[str, ...] = ()  # tensors of the files that the model does not use
    unembedded: tuple[str, ...] = ()  # tokens of the tokenizer that have no embedding
    appended_end: str | None = None  # the end token that the tokenizer appends to every prompt
    # Settings of generation_config.json, by name, that completions of warmd do not follow.
    unapplied: Mapping[str, Any] = field(default_factory=dict)
    # How it writes messages, where that was given (models.response_templates).
    response_template: Mapping[str, Any] | None = None


class Models(Protocol):
    """The job's interface to the warm models."""

    def take(self, name: str) -> WarmModel:
        """Return the warm model of that name, on the job's device. Raises NotFound.

        A training job may change it; for other kinds it is shared with other jobs.
        """


class Saved(Protocol):
    """The outcome of a save."""

    @property
    def path(self) -> Path:
        """The folder of the checkpoint."""

    @property
    def seconds(self) -> float:
        """Its duration, most of it concurrent with training."""

    @property
    def size_bytes(self) -> int:
        """The size of the checkpoint on disk."""

    @property
    def error(self) -> str | None:
        """Why the save failed; None when it succeeded."""

    @property
    def lacked_space(self) -> bool:
        """Whether it failed because the disk was full."""


class Save(Protocol):
    """A save in progress."""

    @property
    def step(self) -> int:
        """The step of the checkpoint."""

    def outcome(self, *, patience_s: float | None = 0) -> Saved | None:
        """Return the outcome, or None when the save takes longer than `patience_s` (None: wait)."""


class Sink(Protocol):
    """A file opened for sequential writing; a context manager that closes it."""

    def write(self, data: Any, /) -> int:
        """Append the bytes of a buffer; they are copied before this returns."""

    def flush(self) -> None:
        """Do nothing: libraries that write to a file call it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None: ...


class Staging(Protocol):
    """The folder of a checkpoint that is being written."""

    @property
    def path(self) -> Path:
        """The folder, for small files."""

    def open(self, name: str) -> Sink:
        """Open a new file for large data."""


class Checkpoints(Protocol):
    """The checkpoints of one job, committed atomically."""

    def latest(self) -> Path | None:
        """Return the folder of the newest undamaged checkpoint, or None."""

    def save(
        self,
        step: int,
        prepare: Callable[[Any], Callable[[], None]],
        *,
        about: Mapping[str, Any],
    ) -> Save:
        """Commit a checkpoint concurrently with the caller.

        `prepare` is called at once with the Staging and writes what must be written now; the
        function that it returns writes the rest in a thread. `about` is stored in the manifest:
        plain JSON values, among them `metrics`. An error in the thread is in the outcome.
        """

    def about(self, checkpoint: Path) -> dict[str, Any]:
        """Return the `about` that a checkpoint was committed with."""


class Emit(Protocol):
    """Emit an event of this job."""

    def __call__(self, type: str, /, *, step: int | None = None, **fields: Any) -> None:
        """`type` is one word; `fields` are plain JSON values (NaN becomes null)."""


class Patiently(Protocol):
    """Write, and while the disk is full, wait and write again."""

    def __call__(self, write: Callable[[], T], folder: Path | None = None, /) -> T:
        """Return what `write` returns, which must leave nothing behind when it fails.

        `folder`: where it writes, for users who have to make room there. Raises what `write`
        raised, at once when the job is to stop, and for any other cause than a full disk.
        """


class Request(Protocol):
    """A request to a running job (a threading.Event is one)."""

    def is_set(self) -> bool:
        """Whether the request is pending."""


class Never:
    """A request that is never made."""

    def is_set(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What a job is doing, and after how long it counts as stalled."""

    name: str  # a noun: step, evaluation
    began: float  # monotonic clock, plus the time of nested activities
    limit_s: float
    median_s: float | None  # of the latest activities of this name; None: too few
    ends_job: bool = False  # whether a stall ends the job


class Ranks(Protocol):
    """The processes of one job, numbered from 0. All of them run the kind on the same spec.

    Every rank makes the same calls in the same order: a call waits until all have made it. Rank 0
    alone writes files and emits events. Values between ranks are plain JSON values, also NaN and
    infinity; tuples arrive as lists.
    """

    @property
    def rank(self) -> int:
        """The number of this process."""

    @property
    def size(self) -> int:
        """The number of processes."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that torchrun sets (RANK, WORLD_SIZE, …); none in a job of one process.

        Training kinds set them when the training begins, for code of users: earlier, transformers
        would divide batches and wrap the model.
        """

    def from_first(self, make: Callable[[], T]) -> T:
        """Return on every rank what `make` returns on rank 0; it is called on no other."""

    def after_first(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0, then on all others; return its result."""

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order."""

    def sum(self, tensor: Any) -> None:
        """Replace a contiguous tensor by the sum of those of all ranks, equal bit for bit."""


class OneProcess:
    """The Ranks of a job of one process."""

    rank = 0
    size = 1
    environment: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def from_first(self, make: Callable[[], T]) -> T:
        return make()

    def after_first(self, make: Callable[[], T]) -> T:
        return make()

    def gather(self, value: T) -> list[T]:
        return [value]

    def sum(self, tensor: Any) -> None:
        """Leave it as it is."""


ONE_PROCESS: Ranks = OneProcess()


def _ignore(activity: Activity | None) -> None:
    """Default of `Context.working`: no watchdog."""


def _no_time() -> float:
    """Default of `Context.waited_s`: a full disk is an error."""
    return 0.0


def at_once(write: Callable[[], T], folder: Path | None = None, /) -> T:
    """Default of `Context.patiently`: a full disk is an error."""
    return write()


@dataclass(frozen=True, kw_only=True)
class Context:
    """The environment of one execution of a job."""

    job_id: str
    run_dir: Path
    device: str  # a torch device: "cpu", "cuda:0"
    models: Models
    checkpoints: Checkpoints
    emit: Emit
    stop: Request  # save and raise Stopped at the end of the current step
    pause: Request = field(
        default_factory=Never
    )  # wait at the end of the current step, keeping everything in memory
    working: Callable[[Activity | None], None] = _ignore  # None: no activity is expected
    patiently: Patiently = at_once  # for every write beyond events and checkpoints
    stop_at: int | None = None  # the step to stop at without a request
    code_folders: tuple[str, ...] = ()  # that modules of the user are imported from
    eval_at_stop: bool = False  # whether to evaluate there, if the job has held-out data
    queued_s: float | None = None  # how long the job waited in the queue
    rules: int = RULES  # version at submission
    ranks: Ranks = ONE_PROCESS  # the processes of this job
    began: float = field(default_factory=time.monotonic)  # this execution, by the monotonic clock
    ran_s: float = 0.0  # how long earlier executions ran, without pauses
    latest_step: int = 0  # the highest step that an earlier execution has reported
    waited_s: Callable[[], float] = _no_time  # how long this one has waited for a full disk

    def check_stop(self, checkpoint: Path | None = None) -> None:
        """Raise Stopped, at the step of the checkpoint to resume from, if the job is to stop."""
        if self.stop.is_set():
            raise Stopped(0 if checkpoint is None else step_of(checkpoint))

    @property
    def sockets_dir(self) -> Path:
        """HOME/sockets, the folder of the daemon's sockets, or a link to it (0700)."""
        return self.run_dir.parent.parent / "sockets"

    @property
    def cache_dir(self) -> Path:
        """HOME/cache, for data that jobs share, such as tokenized corpora. May not exist."""
        return self.run_dir.parent.parent / "cache"
