"""The estimate of a job as text, for `submit --dry-run`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...jobs import spec_class
from ...jobs.training.row_options import RowTrainingSpec
from . import render

if TYPE_CHECKING:
    from ...daemon.reports.estimate import Amount, JobEstimate

_UNKNOWN = "not known: no job like this has run in this home, and the model's sizes are not known"
_NAMED = 3  # measured jobs that are named


def lines(kind: str, spec: Mapping[str, Any], found: JobEstimate) -> Iterator[tuple[str, str]]:
    """Yield the parts of an estimate as name and text. `spec` has all options."""
    yield from _sizes(kind, spec)
    if found.steps is not None:
        yield "steps", str(found.steps)
    if found.time_limit_s is not None:
        yield "time", _limited(found, found.time_limit_s)
    else:
        yield "time", _UNKNOWN if found.seconds is None else _time(found, found.seconds)
    if found.peak_bytes is not None:
        yield "memory", _memory(found, found.peak_bytes)
    if found.disk_bytes is not None:
        yield "disk", _disk(found, found.disk_bytes)


def hardware(found: JobEstimate) -> tuple[list[str], list[list[str]]]:
    """Return the headers and rows of the table of other hardware."""
    rows = [
        [
            one.name,
            render.duration(one.seconds.value),
            _span(render.duration, one.seconds),
            _span(render.size, one.memory_bytes),
            "yes" if one.fits else "no",
            one.rates,
        ]
        for one in found.hardware
    ]
    return ["HARDWARE", ">TIME", "FROM - TO", "MEMORY", "FITS", "PUBLISHED RATES"], rows


def _time(found: JobEstimate, seconds: Amount) -> str:
    now = time.time()
    text = (
        f"about {render.duration(seconds.value)} ({_span(render.duration, seconds)}), done at "
        f"{render.clock(now + seconds.value)} when it starts now"
    )
    if seconds.source == "computed":
        return (
            f"{text}; computed by the floor model from the measured limits of this machine"
            f"{_measurement(found)}, no job like this has run in this home"
        )
    named = ", ".join(found.jobs[:_NAMED])
    each = render.duration(found.step_s)
    unit = "step" if found.steps is not None else "record"
    data = "" if found.is_same_data else ", which had other data"
    return f"{text}; measured: {each} a {unit}, as in {named}{data}"


def _measurement(found: JobEstimate) -> str:
    """When the speed of this machine was measured, and its load then."""
    if found.measured_at is None:
        return ""
    load = "" if found.load is None else f" at load {render.number(round(found.load, 1))}"
    return f" (measured {render.moment(found.measured_at)}{load}; again: --measure)"


def _limited(found: JobEstimate, limit_s: float) -> str:
    text = (
        f"{render.duration(limit_s)} of running time (time_limit), done at "
        f"{render.clock(time.time() + limit_s)} when it starts now; the steps are planned from "
        "their measured time"
    )
    if found.step_s:
        named = ", ".join(found.jobs[:_NAMED])
        text += f": about {limit_s / found.step_s:.3g} at {render.duration(found.step_s)}"
        text += f" a step, as in {named}" + ("" if found.is_same_data else ", which had other data")
    return text


def _memory(found: JobEstimate, peak: Amount) -> str:
    if peak.source == "measured":
        return f"{_span(render.size, peak)} at most, measured in {', '.join(found.jobs[:_NAMED])}"
    return (
        f"{_span(render.size, peak)}, computed: {render.size(found.state_bytes)} for weights, "
        "gradients and AdamW; libraries and activations come on top"
    )


def _disk(found: JobEstimate, disk: Amount) -> str:
    free = "" if found.disk_free_bytes is None else f"; {render.size(found.disk_free_bytes)} free"
    return f"{_span(render.size, disk)} for the checkpoints that are kept, {disk.source}{free}"


def _span(shown: Any, amount: Amount) -> str:
    low, high = shown(amount.low), shown(amount.high)
    return low if low == high else f"{low} to {high}"


def _passes(spec: Mapping[str, Any]) -> str:
    if spec["time_limit"] is not None:
        return "repeated until the time limit"
    return "1 epoch" if spec["epochs"] == 1 else f"{spec['epochs']} epochs"


def _sizes(kind: str, spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if kind == "grpo":
        completions = spec["prompts_per_step"] * spec["num_generations"]
        source = spec["dataset"] or spec["environment"] or spec["agent"] or "arithmetic"
        yield "records", f"{spec['samples']} of {source}, {_passes(spec)}"
        tokens = spec.get("max_completion_length")
        most = f", at most {completions * tokens:,} tokens" if tokens else ""
        yield "per step", f"{completions} completions{most}"
    elif issubclass(spec_class(kind), RowTrainingSpec):
        yield "rows", f"{spec['samples']} of {spec['dataset']}, {_passes(spec)}"
        yield "per step", f"{spec['batch_size'] * spec['gradient_accumulation']} rows"
    elif kind == "mlm":
        tokens = spec["batch_size"] * spec["gradient_accumulation"] * spec["seq_len"]
        yield "data", f"{spec['data']}, {spec['validation']:.0%} of the documents held out"
        yield "per step", f"at most {tokens:,} tokens"
    elif spec.get("input"):
        path = Path(spec["input"])
        if path.is_file():
            with path.open("rb") as file:
                yield "records", f"{sum(1 for line in file if line.strip())} of {path}"
