"""Reads tensors of safetensors files in float32, and stores them in a type of GGUF.

numpy has no bfloat16, so that the files are read here and not by the library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import SpecError
from ..weight_headers import header

# The largest value that a type can hold: blocks of 32 values have a float16 scale, which is the
# largest of them divided by 127 or 8.
_LARGEST = {"F16": 65504.0, "Q8_0": 65504.0 * 127, "Q4_0": 65504.0 * 8}
TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
_BLOCK = 32  # values of a row that share a scale

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file, not yet read."""

    name: str
    shape: tuple[int, ...]
    _data: Array  # bytes, mapped from the file
    _dtype: str

    def read(self) -> Array:
        """Return the values in float32, in a new array."""
        if self._dtype == "BF16":
            values = (self._data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            kind = {"F64": np.float64, "F32": np.float32, "F16": np.float16}[self._dtype]
            values = self._data.view(kind).astype(np.float32)
        return values.reshape(self.shape)


def tensors_in(files: list[Path]) -> Iterator[Tensor]:
    """Yield the tensors of safetensors files. Raises BadFile, OSError, and SpecError by name."""
    for path in files:
        entries = header(path)
        ends = [entry["data_offsets"][1] for entry in entries.values()]
        begin = path.stat().st_size - max(ends, default=0)  # the data fills the rest of the file
        data = np.memmap(path, dtype=np.uint8, mode="r")
        for name, entry in entries.items():
            first, last = entry["data_offsets"]
            if entry["dtype"] not in ("F64", "F32", "F16", "BF16"):
                takes = "float64, float32, float16 or bfloat16"
                raise SpecError("gguf", f"{name} must be {takes}, got {entry['dtype']}")
            part = data[begin + first : begin + last]
            yield Tensor(name, tuple(entry["shape"]), part, entry["dtype"])


def type_for(name: str, shape: tuple[int, ...], wanted: str, head: str) -> str:
    """Return the type in which a tensor of GGUF is stored where `wanted` is the file's.

    Vectors stay F32. Rows that blocks do not fill stay F16, as in llama.cpp. `head`: the tensor
    whose product are the logits, which four bits would harm most: Q8_0.
    """
    wanted = wanted.upper()
    if len(shape) < 2:
        return "F32"
    if wanted in ("Q8_0", "Q4_0") and shape[-1] % _BLOCK:
        return "F16"
    return "Q8_0" if wanted == "Q4_0" and name == head else wanted


def stored(name: str, values: Array, kind: str) -> Array:
    """Return the bytes of a tensor in a type of GGUF. Raises SpecError where it does not fit."""
    largest = float(np.abs(values).max(initial=0.0))
    if not np.isfinite(largest):
        raise SpecError("gguf", f"{name} must be finite, got infinity or no number")
    if largest > _LARGEST.get(kind, np.inf):
        raise SpecError(
            "gguf",
            f"{name} must be at most {_LARGEST[kind]:.0f} for {kind}, got {largest:.3g}: take "
            "bf16, which has the range of float32",
        )
    import gguf  # type: ignore[import-not-found, unused-ignore]

    found: Array = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return np.ascontiguousarray(found)
