"""Estimates of a job before it is queued: time, memory, disk, here and on other hardware.

Time and memory are those of similar jobs that ran in this home; without one, time is computed by
the floor model (jobs/bench/floor.py) from the measured limits of this machine. Estimates for other
hardware are always computed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import orjson

from ...configs.memory import memory_bytes
from ...jobs.bench import rows
from ...jobs.bench.floor import HARDWARE, Hardware, Limits, ModelSize, StepWork, step_work
from ...jobs.errors import Conflict, SpecError
from ...jobs.files import records
from ...jobs.files.atomic import write_atomic
from ...jobs.ids import by_time
from ...jobs.models.tokenizer_folder import TokenizerFolder
from ...jobs.spec import Spec
from ...jobs.training.options import TrainingSpec
from ..client.capacity import folder_of, size_of
from ..client.client import Client
from ..runs import events
from ..runs.estimate import Estimate
from ..runs.rundir import RunDir, job_ids

MEASURED, COMPUTED = "measured", "computed"

_SEARCHED = 50  # latest jobs of a kind that are searched for similar ones
_USED = 5  # similar jobs that an estimate is made from
_READ = 400  # latest events of a job that are read

# Options that determine the time and memory of a step; then those that only change the length of
# the records.
_GEOMETRY = (
    "model", "architecture", "objective", "prompts_per_step", "num_generations", "batch_size",
    "gradient_accumulation", "max_completion_length", "seq_len", "rollout_dtype", "lora",
    "processes", "nodes", "layers", "hidden_size", "ffn_size", "precision", "max_tokens", "dtype",
)  # fmt: skip
_BEFORE = {"processes": 1, "nodes": 1}  # of jobs from before there were such options
_DATA = ("dataset", "data", "max_length", "max_prompt_length")

_SHARE = 0.3  # of the floor's speed that a step reaches, where nothing like it was measured
_LEAST_SHARE, _MOST_SHARE = 0.02, 0.9
# Resident in every job: the used parts of torch and others, mostly shared with the zygote.
_LIBRARIES_BYTES = (0.4e9, 0.75e9)
_STEP_S = (0.001, 0.01, 0.1)  # of Python in a step of any size: least, usual, on a busy machine
_SCATTER = 0.05  # of the peak of equal jobs
_HOST_LAYER_S = 2e-5  # start of a layer's operations on a CPU
_GPU_LAYER_S = 1e-4


@dataclass(frozen=True)
class _Speed:
    """The measured speed of this machine, as stored."""

    device: str
    flops: float
    bytes_s: float
    measured_at: float | None = None  # None: measured by an earlier version
    load: float | None = None  # of the machine, over the minute before


@dataclass(frozen=True, kw_only=True)
class Amount:
    """An estimated quantity with its range, and where it comes from."""

    source: str  # MEASURED or COMPUTED
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class OnHardware:
    """The estimate for named hardware; always computed."""

    name: str
    rates: str
    seconds: Amount
    memory_bytes: Amount
    fits: bool


@dataclass(frozen=True, kw_only=True)
class JobEstimate:
    """The estimate of a job; None for unknown values."""

    kind: str
    steps: int | None
    seconds: Amount | None
    step_s: float | None  # on this machine
    time_limit_s: float | None = None  # of the running time, which decides the steps
    jobs: tuple[str, ...] = ()  # the similar jobs that were measured
    is_same_data: bool = True  # whether these had the same data set and lengths
    measured_at: float | None = None  # when the speed of this machine was measured, and its load
    load: float | None = None
    peak_bytes: Amount | None = None
    disk_bytes: Amount | None = None
    disk_free_bytes: int | None = None
    state_bytes: float | None = None  # weights, gradients and moments of AdamW
    hardware: tuple[OnHardware, ...] = ()


@dataclass(frozen=True)
class _Run:
    """A similar job: its seconds per step or per record, memory and disk space."""

    job_id: str
    step_s: float
    low_s: float
    high_s: float
    between_s: float
    peak_bytes: int | None
    checkpoint_bytes: int | None
    is_same_data: bool


def estimate(
    client: Client,
    spec: Spec,
    document: Mapping[str, Any],
    *,
    measure: Callable[[], None] | None = None,
    again: bool = False,
) -> JobEstimate:
    """Estimate a checked job; `document` is what `check` returned.

    `measure` is called before this machine is measured, which takes some seconds, once per
    machine and home; None: it is not measured. `again`: measure it once more and keep the better
    values. Raises SpecError and JobFailed.
    """
    located = spec.parse(document["spec"])
    count = _units(located)
    runs = list(_similar(client, spec.kind, document["spec"]))
    work, size = _work_of(located, document)
    found = JobEstimate(
        kind=spec.kind,
        steps=getattr(located, "steps_total", None),
        seconds=None,
        step_s=None,
        time_limit_s=getattr(located, "time_limit_s", None),
        disk_free_bytes=client.home.free_bytes(),
    )
    speed = None
    if again or (size is not None and work is not None):
        speed = _speed(client, measure if again or not runs else None, again=again)
    limits = None if speed is None else _limits(speed)
    if runs:
        found = _measured(found, runs, count)
    elif limits is not None and size is not None and work is not None and found.steps:
        seconds = _computed(work, size, limits, found.steps, _SHARE)
        found = replace(found, seconds=seconds, step_s=seconds.value / found.steps)
        if speed is not None:
            found = replace(found, measured_at=speed.measured_at, load=speed.load)
    if size is not None and work is not None and (found.steps or found.time_limit_s):
        low, high = work[0].memory_bytes(size)[0], work[1].memory_bytes(size)[1]
        if found.peak_bytes is None:
            least, most = _LIBRARIES_BYTES
            found = replace(found, peak_bytes=_between(low + least, high + most))
        found = replace(found, state_bytes=low)
    if size is not None and work is not None and found.steps:
        share = _share(found, work, size, limits)
        hardware = tuple(_on(h, work, size, found.steps, share) for h in HARDWARE)
        found = replace(found, hardware=hardware)
    if isinstance(located, TrainingSpec):
        found = replace(found, disk_bytes=_disk(located, runs, size))
    return found


def _similar(client: Client, kind: str, spec: Mapping[str, Any]) -> Iterator[_Run]:
    """Yield recent jobs with the same geometry; those with the same data alone, if any."""
    ids = [job_id for job_id in job_ids(client.home.runs) if job_id.startswith(f"{kind}-")]
    runs: list[_Run] = []
    for job_id in sorted(ids, key=by_time, reverse=True)[:_SEARCHED]:
        with suppress(Conflict, OSError):
            rundir = client.rundir(job_id)
            other = rundir.read_spec()["spec"]
            if _is_alike(spec, other, _GEOMETRY) and (run := _run(rundir, spec, other)):
                runs.append(run)
    same = [run for run in runs if run.is_same_data]
    yield from (same or runs)[:_USED]


def _run(rundir: RunDir, spec: Mapping[str, Any], other: Mapping[str, Any]) -> _Run | None:
    recent = events.newest(rundir.events, _READ)
    estimate = Estimate()
    for event in reversed(recent):
        estimate.update(event)
    step_s, span = estimate.seconds_per_step, estimate.step_range_s
    if step_s is None or span is None:
        rate = estimate.rows_per_s
        if rate is None:
            return None
        step_s, span = 1 / rate, (1 / rate, 1 / rate)
    return _Run(
        rundir.path.name,
        step_s,
        *span,
        between_s=estimate.seconds_between_steps,
        peak_bytes=_first(recent, "finished", "peak_bytes"),
        checkpoint_bytes=_first(recent, "checkpoint", "bytes"),
        is_same_data=_is_alike(spec, other, _DATA),
    )


def _speed(client: Client, measure: Callable[[], None] | None, *, again: bool) -> _Speed | None:
    """The measured speed of this machine; None if it is not known and not measured."""
    path = client.home.machine_limits
    before = records.read(path, _Speed)
    if measure is None or (before is not None and not again):
        return before
    measure()
    load = os.getloadavg()[0]
    device = next((w.device for w in client.config.workers if w.queue == "train"), "auto")
    found = records.convert(rows.limits(device), _Speed)
    found = replace(found, measured_at=time.time(), load=load)
    if before is not None and before.device == found.device:  # other work only slows it down
        flops, bytes_s = max(found.flops, before.flops), max(found.bytes_s, before.bytes_s)
        found = replace(found, flops=flops, bytes_s=bytes_s)
    client.home.create()
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_atomic(path, orjson.dumps(found))
    return found


def _limits(speed: _Speed) -> Limits:
    return Limits(
        flops=speed.flops,
        bytes_s=speed.bytes_s,
        memory_bytes=memory_bytes(),
        layer_s=_HOST_LAYER_S if speed.device == "cpu" else _GPU_LAYER_S,
    )


def _units(spec: Spec) -> int | None:
    """The steps of a training, or the records of an input file."""
    steps = getattr(spec, "steps_total", None)
    if steps is not None:
        return int(steps)
    path = getattr(spec, "input", None)
    if not path or not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return sum(1 for line in file if line.strip())


def _work_of(
    spec: Spec, document: Mapping[str, Any]
) -> tuple[tuple[StepWork, StepWork] | None, ModelSize | None]:
    """The work of a step and the sizes of the model, as far as its files show them."""
    size = size_of(spec, document) if isinstance(spec, TrainingSpec) else None
    if size is None or not isinstance(spec, TrainingSpec):
        return None, None
    folder = None if document.get("model") is None else folder_of(document)
    counter = None if folder is None else TokenizerFolder(folder).counter()
    return step_work(spec, counter), size


def _measured(found: JobEstimate, runs: list[_Run], count: int | None) -> JobEstimate:
    step_s = statistics.median(run.step_s + run.between_s for run in runs)
    seconds = None
    if count is not None:
        seconds = Amount(
            source=MEASURED,
            value=count * step_s,
            low=count * min(run.low_s + run.between_s for run in runs),
            high=count * max(run.high_s + run.between_s for run in runs),
        )
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    return replace(
        found,
        seconds=seconds,
        step_s=statistics.median(run.step_s for run in runs),
        jobs=tuple(run.job_id for run in runs),
        is_same_data=runs[0].is_same_data,
        peak_bytes=_of_all(peaks) if peaks else None,
    )


def _of_all(values: list[int]) -> Amount:
    return Amount(
        source=MEASURED,
        value=statistics.median(values),
        low=min(values) * (1 - _SCATTER),
        high=max(values) * (1 + _SCATTER),
    )


def _between(low: float, high: float) -> Amount:
    return Amount(source=COMPUTED, value=(low + high) / 2, low=low, high=high)


def _share(
    found: JobEstimate,
    work: tuple[StepWork, StepWork],
    size: ModelSize,
    limits: Limits | None,
) -> float:
    """The share of the floor's speed that a step reaches: measured on this machine, or assumed."""
    if not found.jobs or found.step_s is None or limits is None or not found.step_s > 0:
        return _SHARE
    floor_s = statistics.mean(part.floor_s(size, limits) for part in work)
    return min(max(floor_s / found.step_s, _LEAST_SHARE), _MOST_SHARE)


def _computed(
    work: tuple[StepWork, StepWork], size: ModelSize, limits: Limits, steps: int, share: float
) -> Amount:
    """Seconds of all steps by the floor model; from the floor itself to half of the share.

    The time for Python is added; it dominates with tiny models.
    """
    least, most = (steps * part.floor_s(size, limits) for part in work)
    fixed = [steps * seconds for seconds in _STEP_S]
    return Amount(
        source=COMPUTED,
        value=(least + most) / 2 / share + fixed[1],
        low=least / _MOST_SHARE + fixed[0],
        high=2 * most / share + fixed[2],
    )


def _on(
    hardware: Hardware, work: tuple[StepWork, StepWork], size: ModelSize, steps: int, share: float
) -> OnHardware:
    low, high = work[0].memory_bytes(size)[0], work[1].memory_bytes(size)[1]
    return OnHardware(
        name=hardware.name,
        rates=hardware.rates,
        seconds=_computed(work, size, hardware.limits, steps, share),
        memory_bytes=_between(low, high),
        fits=high < hardware.limits.memory_bytes,
    )


def _disk(spec: TrainingSpec, runs: list[_Run], size: ModelSize | None) -> Amount | None:
    """The bytes of the checkpoints that are kept; the final model shares files with the last one.

    One more than is kept exists while a checkpoint is written.
    """
    measured = [run.checkpoint_bytes for run in runs if run.checkpoint_bytes is not None]
    if measured:
        source, each = MEASURED, float(statistics.median(measured))
    elif size is not None:
        source, each = COMPUTED, 12.0 * size.trained  # float32 weights and two moments
    else:
        return None
    interval = spec.save_interval.steps
    try:
        steps = spec.steps_total
    except SpecError:
        steps = None
    most = spec.keep if steps is None else steps if interval is None else -(-steps // interval)
    kept = min(spec.keep, most) + (spec.keep_best is not None)
    return Amount(source=source, value=each * kept, low=each * kept, high=each * (kept + 1))


def _is_alike(spec: Mapping[str, Any], other: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    return all(spec.get(name) == other.get(name, _BEFORE.get(name)) for name in names)


def _first(recent: list[dict[str, Any]], type: str, name: str) -> int | None:
    """A whole number of the latest event of a type that has it."""
    values = (event.get(name) for event in recent if event["type"] == type)
    return next((value for value in values if isinstance(value, int)), None)
