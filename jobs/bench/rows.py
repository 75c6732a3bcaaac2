"""The benchmarks from outside: their processes one after another, and the rows of the table.

Imports no torch: the processes do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import orjson

from ...configs.precision import NATIVE
from ..errors import JobFailed
from .works import GRPO, MLM, SFT, WEIGHT_BYTES

OnProgress = Callable[[str], None]  # is called with what is being done


@dataclass(frozen=True, kw_only=True)
class Row:
    """A work in the table. In seconds or hours less is better, in tokens per second more.

    `stock` and `warmd` are medians, `faster` is what the one gains over the other, `floor` what the
    machine permits at best, `share` how much of that warmd reaches (1: all of it). The bytes are
    the peak private memory of a process, None where both sides are in one.
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
    flops: float | None = None  # of float32 products a second, as measured for the floor
    bytes_s: float  # read from memory, the same


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured."""

    pairs: int  # of both sides in turn
    steps: int = 2  # of GRPO and SFT in each process, after one to warm up
    threads: int | None = None  # None: as many as torch takes


def grpo(works: list[str], effort: Effort, told: OnProgress) -> Iterator[Row]:
    """Yield a row for each work: TRL's and warmd's steps, each side in processes of its own."""
    for work in works:
        made = GRPO[work]
        beta = f", beta {made.beta}" if made.beta else ""
        text = f"GRPO {work}: {made.generations} x {made.prompt}+{made.completion}{beta}, a step"
        yield _steps_row(text, *_steps("grpo", work, effort, told))


def sft(works: list[str], effort: Effort, told: OnProgress) -> Iterator[Row]:
    """Yield a row for each work: TRL's and warmd's steps, each side in processes of its own."""
    for work in works:
        made = SFT[work]
        prompt, completion = (f"{least}..{most}" for least, most in (made.prompt, made.completion))
        text = f"SFT {work}: {made.rows} x {prompt}+{completion}, a step"
        yield _steps_row(text, *_steps("sft", work, effort, told))


def _steps(
    kind: str, work: str, effort: Effort, told: OnProgress
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run both sides of a trainer in turn; return what TRL's and warmd's processes measured."""
    found: dict[str, list[dict[str, Any]]] = {"trl": [], "warmd": []}
    with tempfile.TemporaryDirectory(prefix="warmd-bench-") as folder:
        told(f"{kind} {work}: making the model")
        _child("model", kind, work, folder, threads=effort.threads)
        for pair in range(effort.pairs):
            # The second pair in the other order: the machine may be warming up, or cooling.
            for side in ("trl", "warmd") if pair % 2 == 0 else ("warmd", "trl"):
                told(f"{kind} {work}: pair {pair + 1} of {effort.pairs}, {side}")
                found[side].append(
                    _child(kind, side, work, folder, effort.steps, threads=effort.threads)
                )
    return found["trl"], found["warmd"]


def _steps_row(text: str, stock: list[dict[str, Any]], ours: list[dict[str, Any]]) -> Row:
    stock_s, ours_s = ([s for run in runs for s in run["seconds"]] for runs in (stock, ours))
    best = min([*stock, *ours], key=lambda run: run["floor_s"])
    return Row(
        work=text,
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
    )


def mlm(works: list[str], effort: Effort, told: OnProgress) -> Iterator[Row]:
    """Yield a row for each work's micro-step, and one for many updates where it projects them."""
    for name in works:
        work = MLM[name]
        told(f"mlm {name}: {effort.pairs} pairs, {work.updates} updates")
        found = _child("mlm", name, effort.pairs, threads=effort.threads)
        model = "code-graph encoder" if work.is_graph else "BERT"
        text = f"{model} {name}: {work.rows} x {work.length}"
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
        # Pair by pair: of what disturbs, most falls on both.
        faster=median(a / b for a, b in zip(stock, ours, strict=False)),
        floor=floor_s * scale,
        share=floor_s / median(ours),
        flops=found["flops"],
        bytes_s=found["bytes_s"],
    )


def infer(works: list[str], effort: Effort, told: OnProgress) -> Iterator[Row]:
    """Yield a row for each work and precision: one request at a time, after its prompt."""
    for work in works:
        with tempfile.TemporaryDirectory(prefix="warmd-bench-") as folder:
            told(f"infer {work}: making the model")
            _child("model", "infer", work, folder, threads=effort.threads)
            told(f"infer {work}: {effort.pairs} rounds")
            found = _child("infer", work, folder, effort.pairs, threads=effort.threads)
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
                # Round by round: of what disturbs, most falls on all.
                faster=median(a / b for a, b in zip(rates, found["stock"], strict=True)),
                floor=median(floors),
                share=median(a / b for a, b in zip(rates, floors, strict=True)),
                bytes_s=median(bandwidths),
            )


def _child(module: str, *words: object, threads: int | None) -> dict[str, Any]:
    """Run a module of this package and return what it printed. Raises JobFailed."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if threads is not None:
        environ["OMP_NUM_THREADS"] = str(threads)
    package = __package__ or ""
    done = subprocess.run(
        [sys.executable, "-m", f"{package}.{module}", *map(str, words)],
        env=environ,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise JobFailed(
            f"bench {module} {words[0]} ended with {done.returncode}: "
            f"{said[-1] if said else 'it said nothing'}"
        )
    printed: dict[str, Any] = orjson.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    return printed
