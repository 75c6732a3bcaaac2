"""Runs the benchmarks, each in processes of its own, and returns the rows of their table.

Imports no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import orjson

from ...configs.gpus import AUTO, CPU, visible_devices
from ...configs.precision import NATIVE
from ..compute import cache
from ..errors import JobFailed
from .works import DPO, GRPO, MLM, SFT, WEIGHT_BYTES

OnProgress = Callable[[str], None]  # receives a description of the current measurement


@dataclass(frozen=True, kw_only=True)
class Row:
    """A workload's row in the table.

    `stock`, `warmd`: medians in `unit`; `faster`: warmd's speedup; `floor`: the limit of the
    hardware in `unit`; `share`: the share of that limit that warmd reaches (0 to 1). The bytes
    are peaks of a process, private or on the GPU; None if both sides run in one process.
    """

    work: str
    unit: str  # "s", "h" or "tok/s"
    stock: float
    warmd: float
    faster: float
    floor: float
    share: float
    stock_private_bytes: int | None = None
    warmd_private_bytes: int | None = None
    flops: float | None = None  # operations per second of a GEMM, measured for the floor
    bytes_s: float  # memory bandwidth in bytes per second, measured for the floor
    device: str  # cpu or cuda


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured."""

    pairs: int  # measurements of each side, alternately
    steps: int = 2  # steps of GRPO, SFT and DPO per process, after one for warm-up
    threads: int | None = None  # None: torch's default
    device: str = CPU  # as WorkerConfig.device


def grpo(works: list[str], effort: Effort, report: OnProgress) -> Iterator[Row]:
    """Yield a row for each work: TRL's and warmd's steps, each side in processes of its own."""
    for work in works:
        made = GRPO[work]
        beta = f", beta {made.beta}" if made.beta else ""
        lora = f", rank {made.lora}" if made.lora else ""
        sizes = f"{made.generations} x {made.prompt}+{made.completion}{beta}{lora}"
        yield _steps_row("grpo", work, sizes, effort, report)


def on_rows(kind: str, works: list[str], effort: Effort, report: OnProgress) -> Iterator[Row]:
    """Yield a row for each work of SFT or DPO, as `grpo` does."""
    for work in works:
        made = (SFT if kind == "sft" else DPO)[work]
        prompt, completion = (f"{least}..{most}" for least, most in (made.prompt, made.completion))
        sizes = f"{prompt}+{completion}" if kind == "sft" else f"({prompt})+2x({completion})"
        yield _steps_row(kind, work, f"{made.rows} x {sizes}", effort, report)


sft, dpo = partial(on_rows, "sft"), partial(on_rows, "dpo")


def _steps(
    kind: str, work: str, effort: Effort, report: OnProgress
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run both sides alternately; return the measurements of TRL's and of warmd's processes."""
    found: dict[str, list[dict[str, Any]]] = {"trl": [], "warmd": []}
    with tempfile.TemporaryDirectory(prefix="warmd-bench-") as folder:
        report(f"{kind} {work}: making the model")
        _child("model", kind, work, folder, effort=effort)
        for pair in range(effort.pairs):
            # Every second pair in reverse order: the machine may be warming up or cooling down.
            for side in ("trl", "warmd") if pair % 2 == 0 else ("warmd", "trl"):
                report(f"{kind} {work}: pair {pair + 1} of {effort.pairs}, {side}")
                found[side].append(_child(kind, side, work, folder, effort.steps, effort=effort))
    return found["trl"], found["warmd"]


def _steps_row(kind: str, work: str, sizes: str, effort: Effort, report: OnProgress) -> Row:
    stock, ours = _steps(kind, work, effort, report)
    stock_s, ours_s = ([s for run in runs for s in run["seconds"]] for runs in (stock, ours))
    best = min([*stock, *ours], key=lambda run: run["floor_s"])
    return Row(
        work=f"{kind.upper()} {work}: {sizes}, a step",
        unit="s",
        stock=median(stock_s),
        warmd=median(ours_s),
        faster=median(stock_s) / median(ours_s),
        floor=best["floor_s"],
        share=best["floor_s"] / median(ours_s),
        stock_private_bytes=max(run["private_bytes"] for run in stock),
        warmd_private_bytes=max(run["private_bytes"] for run in ours),
        flops=best["flops"],
        bytes_s=best["bytes_s"],
        device=best["device"],
    )


def mlm(works: list[str], effort: Effort, report: OnProgress) -> Iterator[Row]:
    """Yield a row for each workload's micro-step, and one for its projected updates, if any."""
    for name in works:
        work = MLM[name]
        report(f"mlm {name}: {effort.pairs} pairs, {work.updates} updates")
        found = _child("mlm", name, effort.pairs, effort=effort)
        model = "code-graph encoder" if work.is_graph else "BERT"
        text = f"{model} {name}: {work.batch_size} x {work.length}"
        yield _mlm_row(f"{text}, forward + backward", found, "", found["floor_s"], "s", 1)
        if work.updates:
            yield _mlm_row(
                f"{text}, {work.projected:,} updates by {work.updates}",
                found,
                "update_",
                found["update_floor_s"],
                "h",
                work.projected / 3600,
            )


def _mlm_row(
    text: str, found: dict[str, Any], kind: str, floor_s: float, unit: str, scale: float
) -> Row:
    stock, ours = found[f"stock_{kind}s"], found[f"warmd_{kind}s"]
    return Row(
        work=text,
        unit=unit,
        stock=median(stock) * scale,
        warmd=median(ours) * scale,
        # Pair by pair: most disturbances affect both sides of a pair.
        faster=median(a / b for a, b in zip(stock, ours, strict=False)),
        floor=floor_s * scale,
        share=floor_s / median(ours),
        flops=found["flops"],
        bytes_s=found["bytes_s"],
        device=found["device"],
    )


def infer(works: list[str], effort: Effort, report: OnProgress) -> Iterator[Row]:
    """Yield a row for each workload and precision: single-sequence decode, without prefill."""
    for work in works:
        with tempfile.TemporaryDirectory(prefix="warmd-bench-") as folder:
            report(f"infer {work}: making the model")
            _child("model", "infer", work, folder, effort=effort)
            report(f"infer {work}: {effort.pairs} rounds")
            found = _child("infer", work, folder, effort.pairs, effort=effort)
        for precision, weight_bytes in WEIGHT_BYTES.items():
            if precision not in found:
                continue
            rates, text = found[precision], "float32" if precision == NATIVE else precision
            # Every token reads all weights once.
            bandwidths = found["bytes_s"][precision]
            floors = [bytes_s / (weight_bytes * found["weights"]) for bytes_s in bandwidths]
            yield Row(
                work=f"decode {work}, one request, {text}",
                unit="tok/s",
                stock=median(found["stock"]),
                warmd=median(rates),
                # Round by round: most disturbances affect all of a round.
                faster=median(a / b for a, b in zip(rates, found["stock"], strict=True)),
                floor=median(floors),
                share=median(a / b for a, b in zip(rates, floors, strict=True)),
                bytes_s=median(bandwidths),
                device=found["device"],
            )


def check_device(device: str) -> None:
    """Raise JobFailed if `device` (as WorkerConfig.device) is a GPU that CUDA cannot use."""
    if device not in (AUTO, CPU):
        _child("machine", "device", effort=Effort(pairs=1, device=device))


def limits(device: str) -> dict[str, Any]:
    """Measure `flops` and `bytes_s` of a device in a process of its own; takes some seconds.

    `device`: as WorkerConfig.device. Raises JobFailed.
    """
    return _child("machine", "limits", effort=Effort(pairs=1, device=device))


def _child(module: str, *words: object, effort: Effort) -> dict[str, Any]:
    """Run a module of this package in a process; return the JSON that it printed.

    Raises JobFailed.
    """
    cache.keep_library_caches()
    visible = visible_devices(effort.device, os.environ.get("CUDA_VISIBLE_DEVICES"))
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": visible}
    environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if effort.threads is not None:
        environ["OMP_NUM_THREADS"] = str(effort.threads)
    package = __package__ or ""
    done = subprocess.run(
        [sys.executable, "-m", f"{package}.{module}", *map(str, words)],
        env=environ,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise JobFailed(
            f"bench {module} {words[0]} ended with {done.returncode}: "
            f"{lines[-1] if lines else 'it printed nothing'}"
        )
    printed: dict[str, Any] = orjson.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    if printed.get("device") == "cpu" and effort.device not in (AUTO, CPU):
        raise JobFailed(f"device: must be a GPU that CUDA can use, got {effort.device}")
    return printed
