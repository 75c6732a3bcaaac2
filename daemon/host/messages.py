"""The messages between the processes of one daemon: a dataclass each, and their JSON.

| from | to | over | messages |
| --- | --- | --- | --- |
| client | supervisor | control socket | Stop, LoadModel, UnloadModel, ListModels, GetStatus, … |
| supervisor | client | control socket | Stopping, Model, Unloaded, Models, Status, Ready, Failure |
| supervisor | zygote | zygote socket | LoadFolder, UnloadModel, GetStatus |
| zygote | supervisor | zygote socket | Model, Unloaded, ZygoteStatus, Failure |
| worker | zygote, horse | horse connection | RunJob, StopJob, PauseJob, DropAdapter |
| horse | worker | horse connection | HorseStarted, JobEvent, JobWaits, RetireHorse, … |
| zygote | worker | horse connection | HorseExit, RetireHorse, UseHorse, DropAdapter, Failure |
| download process | its owner | its stdin and stdout | DownloadProgress, Downloaded, Failure |
| supervisor | its children | stdin | ZygoteSettings, WorkerSettings, … |
| children | supervisor | stdout | Alive, BootProgress, ModelsLoaded, ChildReady, JobsHeld, … |
| supervisor | `warmd start` | stdout | BootProgress, Booted, Failure |

A message is one line: a JSON object with its fields, and its class in `op`. All processes of a
daemon have the same messages, so nothing here has to stay compatible: after an upgrade that changes
them, `warmd reload` is refused (installed.py).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import orjson

from ...configs.config import DaemonConfig, ModelConfig, WorkerConfig
from ...configs.gpus import AUTO
from ...jobs.context import Activity
from ...jobs.errors import Conflict, JobFailed, NotFound, SpecError, Unavailable, WarmdError
from ...jobs.files.records import convert

RETIRE = signal.SIGTERM  # to a zygote that another replaces (warmd reload): end with the last horse

# The classes that an error keeps between processes: callers and HTTP statuses depend on them.
_ERRORS: dict[str, type[WarmdError]] = {
    error.__name__: error for error in (SpecError, NotFound, Conflict, Unavailable, JobFailed)
}
_CLASSES: dict[str, type[Message]] = {}  # by `op`


class Message:
    """Base of all messages; `op` names the class on the wire."""

    op: ClassVar[str]

    def __init_subclass__(cls, *, op: str) -> None:
        cls.op = op
        _CLASSES[op] = cls


def encode(message: Message) -> bytes:
    """Return the message as one line of JSON. Values that JSON lacks raise TypeError."""
    # orjson writes the dataclasses within by itself.
    return orjson.dumps({"op": message.op, **message.__dict__}, option=orjson.OPT_APPEND_NEWLINE)


def decode(line: bytes | bytearray | str) -> Message | None:
    """Return the message in a line of JSON.

    Malformed for a JSON object that is not a message, and None for a line that is not a JSON
    object: the sender may have died in the middle of it.
    """
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(fields, dict):
        return None
    try:
        return convert(fields, _CLASSES[fields.pop("op")])
    except (LookupError, TypeError, ValueError) as error:
        return Malformed(repr(error)[:200])


@dataclass(frozen=True)
class Malformed(Message, op="malformed"):
    """Takes the place of a JSON object that is not a message."""

    problem: str


# --- parts of messages ------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalModel:
    """A model and the folder that holds its files."""

    config: ModelConfig
    folder: str | None  # None: not yet downloaded
    files: str = ""  # fingerprint of the files, where the sender knows it (model_files)


@dataclass(frozen=True)
class WantedModel:
    """A model that the zygote loads at its start."""

    model: LocalModel
    is_required: bool  # the daemon cannot start without it


@dataclass(frozen=True)
class HorsePlan:
    """Settings of a horse before its job: the fields of RunJob with the same names."""

    device: str
    gpu_memory: int
    niceness: int


@dataclass(frozen=True)
class RunningJob:
    """A started job and the configured name of its worker."""

    worker: str
    job: str


@dataclass(frozen=True)
class GangPlan:
    """The part of one node in a job that several nodes run together."""

    nodes: list[str]  # the names of all, in the order of their ranks
    node: int  # the number of this one; node 0 has rank 0
    address: str  # at which the ranks of this node listen
    secret: str = field(repr=False)  # known to the ranks of this execution only
    host: str = ""  # where rank 0 listens for the others; not known to node 0 yet
    port: int = 0


# --- failures, on every connection ------------------------------------------------------------


@dataclass(frozen=True)
class Failure(Message, op="error"):
    """The request failed, or the process cannot start."""

    error: str
    exit_code: int = 1
    kind: str = ""  # the class of the error, one of _ERRORS; "": WarmdError

    @classmethod
    def of(cls, error: WarmdError) -> Self:
        classes = (base.__name__ for base in type(error).__mro__)
        kind = next((name for name in classes if name in _ERRORS), "")
        return cls(str(error), error.exit_code, kind)

    def to_exception(self) -> WarmdError:
        if self.kind == SpecError.__name__:
            return SpecError(*self.error.split(": ", 1))
        failure = _ERRORS.get(self.kind, WarmdError)(self.error)
        failure.exit_code = self.exit_code
        return failure


# --- control socket ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Stop(Message, op="stop"):
    """End the daemon; `now`: without letting jobs save first."""

    now: bool


@dataclass(frozen=True)
class LoadModel(Message, op="load"):
    """Download a model if needed, and load it; `is_kept`: also at every later start."""

    model: ModelConfig
    is_kept: bool


@dataclass(frozen=True)
class Reload(Message, op="reload"):
    """Replace zygote and workers by new processes."""


@dataclass(frozen=True)
class GetReload(Message, op="get_reload"):
    """Return how far the latest reload is."""


@dataclass(frozen=True)
class ReloadStatus(Message, op="reload_status"):
    """How far the latest reload is."""

    stage: str  # none, requested, starting (the zygote), workers or failed
    detail: str  # what the new zygote does while it starts
    problem: str | None
    pending: list[str]  # workers whose new process is about to start
    waiting: list[RunningJob]  # jobs that old processes have still to end
    upgrades: list[str]  # software that is newer on disk than in zygote and workers


@dataclass(frozen=True)
class UnloadModel(Message, op="unload"):
    """Unload a model (also on the zygote socket)."""

    name: str


@dataclass(frozen=True)
class ListModels(Message, op="models"):
    """Return the loaded models."""


@dataclass(frozen=True)
class GetStatus(Message, op="status"):
    """Return the state of the daemon; on the zygote socket, of the zygote."""


@dataclass(frozen=True)
class GetReady(Message, op="ready"):
    """Return whether jobs can be run; the supervisor replies without other processes."""


@dataclass(frozen=True)
class StartCommands(Message, op="start_commands"):
    """Start the command line's server, unless it runs; the reply is the same message."""


@dataclass(frozen=True)
class TestNotification(Message, op="notify_test"):
    """Deliver a test notification as the daemon delivers others; reply when it has arrived."""


@dataclass(frozen=True)
class Notified(Message, op="notified"):
    """The delivery of a test notification has ended."""

    problem: str | None  # why it failed; None: it arrived


@dataclass(frozen=True)
class Stopping(Message, op="stopping"):
    """The daemon is stopping; these jobs are saving."""

    running: list[RunningJob]


@dataclass(frozen=True)
class Model(Message, op="model"):
    """A loaded model, as `warmd models --json` shows it."""

    model: dict[str, Any]


@dataclass(frozen=True)
class Unloaded(Message, op="unloaded"):
    """The model is no longer loaded, unless it is `kept_for` adapters until they are unloaded."""

    name: str
    kept_for: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Models(Message, op="model_list"):
    """The loaded models, as `warmd models --json` shows them."""

    models: list[dict[str, Any]]


@dataclass(frozen=True)
class Status(Message, op="daemon_status"):
    """The document that `warmd status --json` prints."""

    document: dict[str, Any]


@dataclass(frozen=True)
class Ready(Message, op="daemon_ready"):
    """Whether the zygote is ready, which queues have a ready worker, and whether all have one."""

    zygote: bool
    queues: list[str]
    takes_jobs: bool  # all workers accept jobs, none is requested to leave, and Redis replies
    silent_s: float  # since the latest iteration of the supervisor's main loop


# --- zygote socket ----------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadFolder(Message, op="load_folder"):
    """Load a model from its folder."""

    model: LocalModel


@dataclass(frozen=True)
class ZygoteStatus(Message, op="zygote_status"):
    """The state of the zygote; most fields are in `warmd status --json`."""

    pid: int
    started: float  # unix seconds
    imports_s: float
    memory_bytes: int
    settled: bool  # whether its memory has been moved into huge pages
    budget_bytes: int
    horses: list[dict[str, Any]]
    standbys: list[int]  # process ids
    models: list[dict[str, Any]]


# --- horse connection -------------------------------------------------------------------------


@dataclass(frozen=True)
class RunJob(Message, op="run"):
    """Run a job: the zygote forks a horse for it, a resident horse runs it itself."""

    job_id: str
    worker: str
    run_dir: str
    execution: int  # its number, from 1
    slots: int
    threads: int | None
    niceness: int
    enqueued_at: float | None  # unix seconds of Redis' clock
    model: LocalModel | None = None
    device: str = AUTO  # this and the next two as in WorkerConfig
    gpu_memory: int = 100
    copy_threads: int = 0
    isolation: str = "fork"  # "resident": the horse runs several jobs
    forked_at: float | None = None  # monotonic clock; set by the zygote
    is_model_changed: bool = False  # set by the zygote: it reloaded the model for this job
    clock_offset_s: float = 0.0  # how far Redis' clock is ahead of this machine's
    gang: GangPlan | None = None  # None: the job runs on one node

    @property
    def plan(self) -> HorsePlan:
        return HorsePlan(self.device, self.gpu_memory, self.niceness)

    @property
    def is_first_node(self) -> bool:
        """Whether the horse has rank 0 of the job, which writes the run directory."""
        return self.gang is None or self.gang.node == 0


@dataclass(frozen=True)
class StopJob(Message, op="stop_job"):
    """Save and stop a job; `reason`: drain, cancel, pause, timeout, stall or kill."""

    job: str
    reason: str


@dataclass(frozen=True)
class PauseJob(Message, op="pause_job"):
    """Hold a job at the end of its step, or continue it."""

    job: str
    is_paused: bool


@dataclass(frozen=True)
class HorseStarted(Message, op="horse"):
    """The horse has started and accepts requests."""

    pid: int


@dataclass  # not frozen: one is built per decoded token, and that takes longer if frozen
class JobEvent(Message, op="event"):
    """An event of the job, which the horse has written to its events.jsonl."""

    job: str
    event: dict[str, Any]
    is_written: bool = True  # False: the disk has no room for it, as yet


@dataclass(frozen=True)
class JobWaits(Message, op="waits"):
    """The job waits for something that the machine lacks; None: no longer."""

    job: str
    what: str | None  # such as "space in /home/me/runs"
    reason: str = ""  # the error message of the operating system


@dataclass(frozen=True)
class JobActivity(Message, op="activity"):
    """The current activity of the job, for the watchdog; None: nothing that is timed."""

    job: str
    activity: Activity | None


@dataclass(frozen=True)
class GangListening(Message, op="gang_listening"):
    """Rank 0 of a job of several nodes listens for the other ranks at this port."""

    job: str
    port: int


@dataclass(frozen=True)
class GangMet(Message, op="gang_met"):
    """All ranks of a job of several nodes are connected."""

    job: str


@dataclass(frozen=True)
class JobOutcome(Message, op="outcome"):
    """How an execution ended, or one node's part of it."""

    job: str
    # finished, stopped, failed, lost (its other nodes cannot be reached), or lacking: it cannot run
    # before the machine has again what it lacks
    outcome: str
    reason: str = ""  # of one that stopped: as in StopJob, or superseded
    error: str = ""  # of one that failed or is lost; what is lacking
    is_logged: bool = True  # whether its last event has been written


@dataclass(frozen=True)
class HorseExit(Message, op="exit"):
    """The horse has ended: its exit code (negative: the signal) and peak resident memory."""

    code: int
    peak_bytes: int


@dataclass(frozen=True)
class RetireHorse(Message, op="retire"):
    """Give the resident horse no more jobs: its model is no longer loaded, or it has grown."""


@dataclass(frozen=True)
class UseHorse(Message, op="use_horse"):
    """Send the job to this resident horse of the worker: it has the base of the job's model."""

    pid: int
    is_model_changed: bool  # as in RunJob


@dataclass(frozen=True)
class DropAdapter(Message, op="forget"):
    """An adapter was unloaded or loaded again: request the next job with it of the zygote."""

    name: str


# --- download process -------------------------------------------------------------------------


@dataclass(frozen=True)
class DownloadProgress(Message, op="download_progress"):
    """Bytes downloaded so far; the total is None if the hub does not report sizes."""

    bytes: int
    total_bytes: int | None


@dataclass(frozen=True)
class Downloaded(Message, op="downloaded"):
    """The download is complete."""

    folder: str


# --- stdin and stdout of the supervisor's children --------------------------------------------


@dataclass(frozen=True)
class ZygoteSettings(Message, op="zygote_settings"):
    budget_bytes: int
    models: list[WantedModel] = field(default_factory=list)
    standbys: list[HorsePlan] = field(default_factory=list)  # one per standby horse
    is_next: bool = False  # listens on next_zygote_socket: another zygote serves


@dataclass(frozen=True)
class WorkerSettings(Message, op="worker_settings"):
    config: WorkerConfig
    url: str  # of Redis
    name: str  # in Redis; new at every start
    is_shared: bool  # other daemons use the same Redis
    lease_s: float
    labels: dict[str, str] = field(default_factory=dict)  # jobs that need others are set aside
    max_jobs: int | None = None  # after which it takes no more; None: no limit
    gang_wait_s: float = 60.0  # for other nodes to join a job of several nodes
    runs: str | None = None  # URL of the run store; None: none


@dataclass(frozen=True)
class GatewaySettings(Message, op="gateway_settings"):
    config: dict[str, Any]  # DaemonConfig.to_json
    url: str  # of Redis

    def daemon_config(self) -> DaemonConfig:
        return DaemonConfig.from_json(self.config)


@dataclass(frozen=True)
class UploaderSettings(Message, op="uploader_settings"):
    runs: str  # URL of the run store


@dataclass(frozen=True)
class NotifierSettings(Message, op="notifier_settings"):
    target: str  # a webhook's URL or a shell command
    events: list[str]  # their types


@dataclass(frozen=True)
class GroupSettings(Message, op="group_settings"):
    url: str  # of Redis; may hold a password
    runs: str | None = None  # URL of the run store; None: none


@dataclass(frozen=True)
class Alive(Message, op="alive"):
    """Heartbeat: the child's main loop is running."""


@dataclass(frozen=True)
class BootProgress(Message, op="progress"):
    """A stage of the daemon's start: server, recovery, imports or model."""

    stage: str
    done: bool
    name: str | None = None  # of the model or library; of the server: embedded or external
    seconds: float | None = None
    memory_bytes: int | None = None
    problem: str | None = None  # why a model that an earlier run had loaded is not loaded
    note: str | None = None  # of a recovery: what was lost, or restored


@dataclass(frozen=True)
class ModelsLoaded(Message, op="models_loaded"):
    """The models that the zygote holds now."""

    models: list[ModelConfig]


@dataclass(frozen=True)
class ChildReady(Message, op="child_ready"):
    """The zygote or the worker accepts jobs."""


@dataclass(frozen=True)
class JobsHeld(Message, op="jobs_held"):
    """The jobs that a worker holds now, and how many it has taken since its start."""

    jobs: list[str]  # the first of them, if there are very many
    taken: int


@dataclass(frozen=True)
class GatewayStatus(Message, op="gateway"):
    """Where the gateway listens, or why it cannot."""

    url: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class GatewayUse(Message, op="gateway_use"):
    """Who uses the gateway, by the names of their tokens: those with most requests."""

    named: int  # named tokens that are let in
    problem: str | None = None  # of the file of named tokens
    requests: dict[str, int] = field(default_factory=dict)  # name -> open ones
    streams: dict[str, int] = field(default_factory=dict)  # name -> those among them


@dataclass(frozen=True)
class Booted(Message, op="booted"):
    """All models are loaded and all workers ready."""

    pid: int  # of the supervisor
