"""Processor levels: the features of this processor, and the kernel for each precision.

Instruction sets show what is supported; whether it is faster is measured once per machine, on a
layer larger than most caches, and stored next to the machine code. Imports torch; called in the
process that computes.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
import torch
import xxhash
from torch import Tensor

from ...configs.precision import NATIVE as NATIVE  # re-exported for the engine
from ..files import records
from ..files.atomic import write_atomic
from . import cache, native, onednn
from .device import gpu_summary, processor_name
from .quantized import Bfloat16Linear, Int8Linear, LinearFn
from .threads import compute_with
from .training_gemm import measure_gemm

log = logging.getLogger(__name__)

MANY_ROWS = 2**31  # more than any GEMM has
_TRIED_ROWS = (512, 128, 32, 8, 1)  # warmd's kernels are best with few
_TRIED_TILED_ROWS = (32, 16, 8, 4, 1)
_FEW, _SEVERAL = 1, 64  # rows: single-sequence decode; prefill or a batch
_INPUTS, _OUTPUTS = 1024, 4096  # of the measured layer: 16 MB in float32
_TRIALS, _BEST_TRIALS = 7, 3  # at least; until the best time was met so many times
_MOST_S = 2.0  # per ratio, on a machine whose other processes never leave it alone
_AS_FAST = 1.1  # ratio of times; smaller differences are noise
# bfloat16 storage halves the weight traffic of a decode step; prefill may take this much longer.
_STORAGE_MAY_COST = 1.15
# warmd's kernel on weights packed for AMX may take this much longer, as it lets a step be fused: 8
# sequences of 0.5B took 0.9 times as long with a kernel that took 1.3 times as long.
_TILED_MAY_COST = 1.4
_CAPS = (
    "ATEN_CPU_CAPABILITY",
    "NUMBA_CPU_FEATURES",
    "NUMBA_CPU_NAME",
    "ONEDNN_MAX_CPU_ISA",
)


@dataclass(frozen=True)
class Levels:
    """The measurements. Kernels are "warmd" (jobs/compute/native), "onednn" or "torch"."""

    processor: str
    instructions: str  # the best instruction set in use
    float32: str  # kernel of packed float32 layers
    max_rows: int  # warmd's float32 kernel is used for at most this many rows
    # "units" (bf16 arithmetic, oneDNN), "storage" (float32 arithmetic, warmd), None: not served
    bfloat16: str | None
    training: str  # GEMM of float32 training: "onednn" or "torch" (MKL)
    int8: str | None  # kernel, or None: not served
    int4: str | None  # likewise
    tiled_rows: int  # most rows of a fused decode step on bf16 weights packed for AMX
    reasons: dict[str, str] = field(default_factory=dict)  # why a precision is not served
    # Time relative to float32 for the same rows; of float32 itself and on AMX weights, to oneDNN.
    measured: dict[str, float] = field(default_factory=dict)

    def served(self, precision: str) -> str:
        """Return the precision that is served for a requested one, which may be "native"."""
        has = {"int4": self.int4, "int8": self.int8, "bf16": self.bfloat16}.get(precision)
        return precision if has else NATIVE

    def summary(self) -> dict[str, Any]:
        """Return the content of a job's `begin` event and of `warmd doctor`."""
        rows = "all" if self.max_rows >= MANY_ROWS else self.max_rows
        return {
            "processor": self.processor,
            "instructions": self.instructions,
            "float32": self.float32,
            "float32_rows": rows,
            "training": self.training,
            "bf16": self.bfloat16 or f"not served: {self.reasons['bf16']}",
            "int8": self.int8 or f"not served: {self.reasons['int8']}",
            "int4": self.int4 or f"not served: {self.reasons['int4']}",
        }


_lock = threading.Lock()


def levels() -> Levels:
    """Return the levels of this machine: measured by its first call (about a second), then read."""
    with _lock:
        return _levels()


def compute_summary(device: str) -> dict[str, Any]:
    """Return the field of a `begin` event on the hardware: `compute` of a CPU, `gpu` of a GPU."""
    if device == "cpu":
        return {"compute": levels().summary()}
    return {"gpu": gpu_summary(torch.device(device))}


def why_not(precision: str) -> str:
    """Return the reason why a requested precision is not served on this processor."""
    reason = levels().reasons[precision]
    return f"{precision} is not served on this processor, the native one is: {reason}"


@lru_cache(maxsize=1)
def _levels() -> Levels:
    path = _path()
    if (kept := _stored(path)) is not None:
        return kept
    # By one thread: only ratios count, and the caller may fork later.
    with ThreadPoolExecutor(1, initializer=compute_with, initargs=(1,)) as pool:
        try:
            found = pool.submit(measure).result()
        except (MemoryError, RuntimeError) as error:  # torch and oneDNN raise the second
            log.warning("warmd's own kernels are not used: measuring failed: %s", error)
            return _unmeasured(str(error).partition("\n")[0])
    if (kept := _stored(path)) is not None:
        return kept  # of another process that was faster: all are to use the same kernels
    if path is not None:
        try:
            write_atomic(path, orjson.dumps(found))
        except OSError as error:
            log.info("the measurement of this processor is not stored: %s", error)
    return found


def _stored(path: Path | None) -> Levels | None:
    """Return what a process measured before; None if there is none, or it cannot be read."""
    return None if path is None else records.read(path, Levels)


def _unmeasured(reason: str) -> Levels:
    """Return levels after a failed measurement; the next process measures again."""
    return Levels(
        processor=processor_name(),
        instructions=instructions(),
        float32="onednn" if onednn.is_available() else "torch",
        max_rows=0,
        bfloat16=None,
        training="torch",
        int8=None,
        int4=None,
        tiled_rows=0,
        reasons=dict.fromkeys(("bf16", "int8", "int4"), f"measuring failed: {reason}"),
    )


def instructions() -> str:
    """Return the best instruction set that the kernels use; torch's without the native ones."""
    if not native.is_available():
        return str(torch.backends.cpu.get_cpu_capability())
    from .native import intrinsics as i

    if not i.HAS_AVX2:
        return "portable"
    name = "AVX-512" if i.HAS_AVX512 else "AVX2"
    extras = [
        (i.HAS_VNNI, "VNNI"),
        (i.HAS_AVX_VNNI and not i.HAS_VNNI, "AVX-VNNI"),
        (i.HAS_BFLOAT16, "BF16"),
        (i.HAS_AMX, "AMX"),
    ]
    return " ".join([name, *(extra for has, extra in extras if has)])


@torch.inference_mode()
def measure() -> Levels:
    """Measure, with the threads of the calling thread: about a second, 60 MB."""
    panels = _panels()
    reasons: dict[str, str] = {}
    measured: dict[str, float] = {}
    # No random numbers: a job's generator must not advance.
    weight = torch.linspace(-1, 1, _INPUTS * _OUTPUTS).view(_OUTPUTS, _INPUTS)
    plain = _plain(weight)
    best, max_rows = plain, 0
    if panels is not None:
        ours = panels.float32_linear([weight], None, k_block=_INPUTS)
        for rows in _TRIED_ROWS:
            ratio = _ratio(ours, plain, rows)
            measured[f"float32 warmd, {rows} rows"] = round(ratio, 3)
            if ratio <= _AS_FAST:
                max_rows = MANY_ROWS if rows == _TRIED_ROWS[0] else rows
                break
        best = ours if max_rows else plain
        del ours

    def served(name: str, candidates: Sequence[tuple[str, LinearFn]], slower: float) -> str | None:
        """Return the first kernel that is faster for few rows, and at most `slower` for several."""
        if not candidates:
            reasons[name] = "no kernel for it here"
        for kernel, form in candidates:
            few, several = _ratio(form, best, _FEW), _ratio(form, best, _SEVERAL)
            measured[f"{name} {kernel}, {_FEW} rows"] = round(few, 3)
            measured[f"{name} {kernel}, {_SEVERAL} rows"] = round(several, 3)
            if few < 1 and several < slower:
                return kernel
            reasons[name] = f"it is not faster here ({few:.2f} and {several:.2f} times as long)"
        return None

    halves: list[tuple[str, LinearFn]] = []
    eights: list[tuple[str, LinearFn]] = []
    fours: list[tuple[str, LinearFn]] = []
    if onednn.has_bfloat16():
        halves.append(("units", Bfloat16Linear([weight], None)))
    if panels is not None:
        halves.append(("storage", panels.bfloat16_linear([weight], None)))
    if onednn.has_exact_int8():
        eights.append(("onednn", Int8Linear([weight], None)))
    if panels is not None and panels.has_int8():
        if _is_exact(panels.int8_linear, -1.0, 1.0):
            eights.append(("warmd", panels.int8_linear([weight], None)))
        if _is_exact(panels.grouped_int4_linear, -1.0, -0.5):  # 8 steps of scales 1/8 and 1/16
            fours.append(("warmd", panels.grouped_int4_linear([weight], None)))
    if panels is not None:  # kernels come first on whose weights decode steps are fused
        if not panels.reads_onednn_bfloat16():
            halves.reverse()
        if not panels.reads_onednn_int8():
            eights.reverse()
    bfloat16 = served("bf16", halves, _STORAGE_MAY_COST)
    has_tiles = panels is not None and panels.reads_amx_order() and bfloat16 == "units"
    return Levels(
        processor=processor_name(),
        instructions=instructions(),
        float32="warmd" if max_rows else "onednn" if onednn.is_available() else "torch",
        max_rows=max_rows,
        bfloat16=bfloat16,
        training=_training(measured),
        int8=served("int8", eights, 1),
        int4=served("int4", fours, 1),
        tiled_rows=_tiled_rows(panels, weight, measured) if has_tiles else 0,
        reasons=reasons,
        measured=measured,
    )


def _tiled_rows(panels: Any, weight: Tensor, measured: dict[str, float]) -> int:
    """Return for how many rows warmd's kernel is fast enough on weights packed for AMX."""
    form = Bfloat16Linear([weight], None)
    ours = panels.tiled_linear(onednn.address_of(form.packed), form.shape)
    for rows in _TRIED_TILED_ROWS:
        ratio = _ratio(ours, form, rows)
        measured[f"bf16 warmd on AMX weights, {rows} rows"] = round(ratio, 3)
        if ratio <= _TILED_MAY_COST:
            return rows
    return 0


def _training(measured: dict[str, float]) -> str:
    if not onednn.is_available():
        return "torch"
    measured["training by oneDNN, times as fast"] = ratio = round(measure_gemm(), 3)
    return "onednn" if ratio >= _AS_FAST else "torch"


def _plain(weight: Tensor) -> LinearFn:
    if onednn.is_available():
        packed = onednn.pack(weight)
        return lambda x: onednn.linear(x, packed, None)
    return lambda x: torch.nn.functional.linear(x, weight)


def _is_exact(make: Callable[[Sequence[Tensor], None], LinearFn], even: float, odd: float) -> bool:
    """Whether a layer's integer sums are exact, tried on the largest values.

    `even`, `odd`: the weights of its outputs.
    """
    weight = torch.full((128, 256), even)
    weight[1::2] = odd
    x = torch.full((64, 256), -1.0)
    expected = -256.0 * weight[:, :1].T
    form = make([weight], None)
    return all(torch.equal(form(x[:rows]), expected.expand(rows, -1)) for rows in (1, 4, 64))


def _ratio(one: LinearFn, other: LinearFn, rows: int) -> float:
    """Return the time of one layer relative to another: CPU time, alternating, the best of each.

    CPU time also varies with the other processes of the host: on a busy virtual machine the best of
    seven trials gave a ratio of 20 instead of 0.4.
    """
    x = torch.linspace(-1, 1, rows * _INPUTS).view(rows, _INPUTS)
    for form in (one, other):
        form(x)  # warm-up
    times: tuple[list[float], list[float]] = ([], [])
    end = time.monotonic() + _MOST_S
    while len(times[0]) < _TRIALS or not (all(map(_is_settled, times)) or time.monotonic() > end):
        for form, taken in zip((one, other), times, strict=True):
            taken.append(_seconds(form, x))
    return min(times[0]) / min(times[1])


def _is_settled(times: Sequence[float]) -> bool:
    """Whether the best time is no exception."""
    best = min(times)
    return sum(taken <= _AS_FAST * best for taken in times) >= _BEST_TRIALS


def _seconds(form: LinearFn, x: Tensor) -> float:
    begun = time.thread_time()  # CPU time: independent of other processes
    form(x)
    return time.thread_time() - begun


def _panels() -> Any:
    """Return the module of warmd's kernels, or None if it is not available."""
    if not native.is_available():
        return None
    from .native import panels

    return panels


def _path() -> Path | None:
    """Return the file of the measurement; None if nothing can be written."""
    folder = cache.folder()
    if folder is None:
        return None
    settings = [
        processor_name(),
        instructions(),
        torch.__version__,
        str(onednn.is_available()),
    ]
    settings += [os.environ.get(name, "") for name in _CAPS]
    return folder / f"levels-{xxhash.xxh3_64_hexdigest(chr(0).join(settings).encode())}.json"


def main() -> None:
    """Print the levels as JSON. `warmd doctor` runs this in a process of its own."""
    sys.stdout.buffer.write(orjson.dumps({**levels().summary(), "measured": levels().measured}))


if __name__ == "__main__":
    main()
