"""The entries of the lists `models` and `workers`, and the one line that spells each.

    NAME=PATH[,dtype=DTYPE][,task=TASK][,precision=PRECISION][,response_template=FILE]
                                                                    a model; or PATH alone
    NAME=QUEUE[,isolation=ISOLATION][,slots=N][,threads=N][,nice=N][,device=DEVICE]
              [,gpu_memory=SHARE][,copy_threads=N][,standby=on]       a worker

The same line serves options, variables and YAML; YAML also takes the keys one by one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from . import gpus, precision as precisions
from .gpus import AUTO, CPU, read_device
from .queues import INFER, QUEUES, TRAIN
from .values import (
    ConfigError,
    choice,
    folder,
    integer,
    name,
    plain_text,
    unknown_key,
    wrong,
)

DTYPES = ("auto", "float32", "bfloat16", "float16")
TASKS = (
    *("auto", "causal-lm", "masked-lm", "image-text-to-text", "embedding"),
    "sequence-classification",
)
ISOLATIONS = ("fork", "resident")
BUILTIN_MODELS = ("builtin:demo",)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)
_MOST_THREADS = 1024
_MOST_SLOTS = 1024
_MOST_COPY_THREADS = 64
TRAINING_NICE = 15


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model to keep warm."""

    name: str
    path: str  # an absolute folder, a hub id (`org/name`, `name`) or one of BUILTIN_MODELS
    dtype: str = field(default_factory=lambda: "auto" if gpus.visible() else "float32")
    task: str = "auto"
    # precision of the computation, unless a job sets another
    precision: str = field(default_factory=lambda: "bf16" if gpus.visible() else precisions.NATIVE)
    response_template: str | None = None  # an absolute file: how the model writes messages

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", precisions.current(self.precision))


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """A worker: it takes jobs from exactly one queue."""

    name: str
    queue: str
    isolation: str = "fork"
    slots: int = 1  # jobs at a time; only a resident worker of queue infer has more than one
    threads: int | None = None  # None: chosen for each job by its model's size
    nice: int | None = None  # of its horses, as nice(1) has it; None: by the queue
    device: str = AUTO  # AUTO: the first GPU, else the CPU; CPU; cuda:N; the UUID of a GPU or MIG
    gpu_memory: int = 100  # percent of the GPU's memory that one process may take
    copy_threads: int = 0  # that copy weights to the GPU through pinned memory; 0: torch copies
    standby: bool = False  # whether a process is forked ahead of the next job; isolation fork only

    @property
    def takes_part(self) -> bool:
        """Whether it can run a part of a job of several nodes: in forked processes, on a CPU."""
        computes_on_cpu = self.device == CPU or (self.device == AUTO and gpus.visible() == 0)
        return self.queue == TRAIN and self.isolation == "fork" and computes_on_cpu

    @property
    def niceness(self) -> int:
        """The nice value; by default training yields the processor to inference."""
        if self.nice is not None:
            return self.nice
        return TRAINING_NICE if self.queue == TRAIN else 0


def parse_model(text: str, base: Path) -> ModelConfig:
    """Read `NAME=PATH[,dtype=…][,task=…][,precision=…][,response_template=…]`.

    PATH alone: its last part is the name. A relative PATH is looked up from `base`; if it is not a
    folder there and looks like a hub id, it is a hub id. Raises ConfigError.
    """
    return _read_model("model", text, base)


def read_models(field: str, value: object, base: Path) -> tuple[ModelConfig, ...]:
    """Read a list of models, or their lines with `;` between. Raises ConfigError."""
    return _read_list(field, value, base, _read_model)


def read_workers(field: str, value: object, base: Path) -> tuple[WorkerConfig, ...]:
    """Read a list of workers, or their lines with `;` between; `auto`: `_automatic`.

    Raises ConfigError.
    """
    if value in (AUTO, [AUTO], (AUTO,)):
        return _automatic(gpus.visible())
    workers = _read_list(field, value, base, _read_worker)
    if not workers:
        raise ConfigError(field, "must be at least one worker, got none")
    return workers


def _automatic(num_gpus: int) -> tuple[WorkerConfig, ...]:
    """Return one worker of queue train per GPU, or one for the CPU, and one of queue infer."""
    devices = [f"cuda:{index}" for index in range(num_gpus)] or [AUTO]
    training = (
        WorkerConfig(name=f"train-{index}", queue=TRAIN, device=device)
        for index, device in enumerate(devices)
    )
    return (*training, WorkerConfig(name="infer-0", queue=INFER, isolation="resident", slots=32))


_Entry = TypeVar("_Entry", ModelConfig, WorkerConfig)


def _read_list(
    field: str, value: object, base: Path, read: Callable[[str, object, Path], _Entry]
) -> tuple[_Entry, ...]:
    if isinstance(value, str):
        value = [line.strip() for line in value.split(";") if line.strip()]
    if not isinstance(value, list | tuple):
        raise wrong(field, "a list", value)
    entries: dict[str, _Entry] = {}
    for index, item in enumerate(value):
        entry = read(f"{field}[{index}]", item, base)
        if entry.name in entries:
            raise ConfigError(f"{field}[{index}].name", f"must be unique, got {entry.name!r} again")
        entries[entry.name] = entry
    return tuple(entries.values())


def _read_model(field: str, value: object, base: Path) -> ModelConfig:
    if isinstance(value, ModelConfig):
        return value
    keys = _keys(field, value, ModelConfig, "path")
    default = ModelConfig(name="", path="")
    path = _model_path(f"{field}.path", keys.get("path"), base)
    last_part = re.split("[/:]", path)[-1]
    template = keys.get("response_template")
    if template is not None:
        template = str(folder(f"{field}.response_template", template, base))
    return ModelConfig(
        name=name(f"{field}.name", keys.get("name", last_part)),
        path=path,
        dtype=choice(f"{field}.dtype", keys.get("dtype", default.dtype), DTYPES),
        task=choice(f"{field}.task", keys.get("task", default.task), TASKS),
        precision=choice(
            f"{field}.precision",
            precisions.current(keys.get("precision", default.precision)),
            precisions.PRECISIONS,
        ),
        response_template=template,
    )


def _read_worker(field: str, value: object, base: Path) -> WorkerConfig:
    if isinstance(value, WorkerConfig):
        return value
    keys = _keys(field, value, WorkerConfig, "queue")
    threads = keys.get("threads")
    if threads is not None and threads != "auto":
        threads = integer(f"{field}.threads", threads, minimum=1, maximum=_MOST_THREADS)
    nice = keys.get("nice")
    if nice is not None and nice != "auto":
        nice = integer(f"{field}.nice", nice, minimum=0, maximum=19)
    worker = WorkerConfig(
        name=name(f"{field}.name", keys.get("name")),
        queue=choice(f"{field}.queue", keys.get("queue"), QUEUES),
        isolation=choice(
            f"{field}.isolation", keys.get("isolation", WorkerConfig.isolation), ISOLATIONS
        ),
        slots=integer(
            f"{field}.slots", keys.get("slots", WorkerConfig.slots), minimum=1, maximum=_MOST_SLOTS
        ),
        threads=None if threads == "auto" else threads,
        nice=None if nice == "auto" else nice,
        device=read_device(f"{field}.device", keys.get("device", WorkerConfig.device)),
        gpu_memory=_percent(f"{field}.gpu_memory", keys.get("gpu_memory", WorkerConfig.gpu_memory)),
        copy_threads=integer(
            f"{field}.copy_threads",
            keys.get("copy_threads", WorkerConfig.copy_threads),
            minimum=0,
            maximum=_MOST_COPY_THREADS,
        ),
        standby=_switch(f"{field}.standby", keys.get("standby", WorkerConfig.standby)),
    )
    if worker.standby and worker.isolation != "fork":
        problem = f"must be off with isolation {worker.isolation}, got on: its process stays anyway"
        raise ConfigError(f"{field}.standby", problem)
    if worker.slots > 1 and worker.isolation != "resident":
        problem = f"must be 1 with isolation {worker.isolation}, got {worker.slots}"
        raise ConfigError(f"{field}.slots", problem)
    if worker.slots > 1 and worker.queue == TRAIN:
        # torch has one random number generator per process.
        problem = f"must be 1 with queue train, got {worker.slots}: none could resume exactly"
        raise ConfigError(f"{field}.slots", problem)
    return worker


def _switch(field: str, value: object) -> bool:
    if isinstance(value, bool):  # YAML 1.1 reads on and off so
        return value
    return choice(field, value, ("on", "off")) == "on"


def _percent(field: str, value: object) -> int:
    text = str(value).removesuffix("%")
    if not isinstance(value, int | str) or not text.isdigit() or not 1 <= int(text) <= 100:
        raise wrong(field, "a share of the GPU's memory from 1% to 100%", value)
    return int(text)


def _keys(
    field: str, value: object, entry: type[ModelConfig | WorkerConfig], main: str
) -> Mapping[str, Any]:
    """Return the keys of an entry, from a line or a mapping; `main`: the key after NAME=."""
    keys = _line_keys(field, value, main) if isinstance(value, str) else value
    if not isinstance(keys, Mapping):
        raise wrong(field, f"a line NAME={main.upper()} or keys", value)
    known = [f.name for f in fields(entry)]
    for key in keys:
        if key not in known:
            raise unknown_key(field, key, known)
    return keys


def _line_keys(field: str, line: str, main: str) -> dict[str, Any]:
    head, *rest = re.split(r",(?=\w+=)", line)
    before, equals, after = head.partition("=")
    # A folder may have = in its name; the name of an entry has no slash.
    keys = {"name": before, main: after} if equals and "/" not in before else {main: head}
    for part in rest:
        key, _, text = part.partition("=")
        if key in keys:
            raise ConfigError(f"{field}.{key}", f"must stand once, got {line!r}")
        keys[key] = text
    return keys


def _model_path(field: str, value: object, base: Path) -> str:
    takes = "a local folder, a hub id like org/name, or " + ", ".join(BUILTIN_MODELS)
    text = plain_text(field, value, takes)
    if text.startswith("builtin:"):
        return choice(field, text, BUILTIN_MODELS)
    # A name of one of the user's folders wins over the same name on the hub.
    if HUB_ID.fullmatch(text) and not os.path.isdir(base / text):
        return text
    return str(folder(field, text, base))
