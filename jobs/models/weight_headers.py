"""Names and shapes of a model's weights, from the headers of its safetensors files.

Imports no torch; the weights themselves are not read.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

WHOLE = "model.safetensors"  # preferred to the shards of an index
INDEX = "model.safetensors.index.json"

# Wrappers of a model that begin the names of its tensors, and how to save it without them.
_WRAPPERS = {
    "_orig_mod.": "torch.compile: save the model that was compiled, model._orig_mod",
    "module.": "DistributedDataParallel: save the wrapped model, model.module",
    "base_model.model.": "PEFT: save the result of merge_and_unload, or the adapter alone",
}
_NAMES_SHOWN = 3
# Values of weights, where masks and counters are integers. transformers converts any type.
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_IS_WEIGHT = re.compile(r"(^|\.)weight$|(^|\.)bias$")
# Masks and frequencies that old versions of transformers saved, and that follow from the config.
IS_DERIVED = re.compile(r"\.(masked_bias|causal_mask|inv_freq)$|\.(attn|attention)\.bias$")

# Exceptions for damaged files and files of another format.
_UNREADABLE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError),
    *(struct.error, MemoryError, OverflowError),
)


def listed(names: Iterable[str]) -> str:
    """Return the first few names, in order, and the number of others."""
    every = sorted(names)
    others = len(every) - _NAMES_SHOWN
    return ", ".join(every[:_NAMES_SHOWN]) + (f" and {others} more" if others > 0 else "")


def unwrapping(names: Iterable[str]) -> str | None:
    """Return what to do about names of tensors that a wrapper of the model changed, or None."""
    first = min(names, default="")
    for prefix, advice in _WRAPPERS.items():
        if first.startswith(prefix) or f".{prefix}" in first:
            return f"the names have the prefix {prefix} of {advice}"
    return None


def check_headers(folder: Path) -> None:
    """Raise ValueError if weights cannot fit any model, by the names and types in their headers.

    These are weights that were saved in a wrapper, an index that names tensors which its files
    lack, and weights that are integers. Headers that cannot be read are left to the loading of the
    model.
    """
    try:
        types = {name: entry["dtype"] for name, entry in tensors(folder)}
        held = set(types)
        index = folder / INDEX
        is_read = index.is_file() and not (folder / WHOLE).is_file()
        wanted = orjson.loads(index.read_bytes())["weight_map"] if is_read else {}
        absent = sorted(set(wanted) - held)
    except _UNREADABLE:
        return
    if absent:
        raise ValueError(
            f"{INDEX} names {len(absent)} of {len(wanted)} tensors that no file has: "
            f"{listed(absent)}: copy or save the model again"
        )
    integers = {
        f"{name} ({kind})"
        for name, kind in types.items()
        if kind not in _FLOATS and _IS_WEIGHT.search(name) and not IS_DERIVED.search(name)
    }
    if integers:
        raise ValueError(
            f"{len(integers)} of {len(types)} tensors are integers: {listed(integers)}: its "
            "weights are quantized: must be float32, bfloat16 or float16"
        )
    advice = unwrapping(held) if all(map(_is_wrapped, held)) else None
    if advice is not None:
        problem = f"all tensors are missing, as its {len(held)} have other names: {listed(held)}"
        raise ValueError(f"{problem}: {advice}")


def _is_wrapped(name: str) -> bool:
    return name.startswith(tuple(_WRAPPERS))


def _files(folder: Path) -> list[Path]:
    """Return the safetensors files that are loaded: a folder may have copies in other layouts."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    found = sorted(folder.glob("*.safetensors"))
    try:
        named = set(orjson.loads((folder / INDEX).read_bytes())["weight_map"].values())
    except _UNREADABLE:  # there is none, or loading the model reports the reason
        return found
    return [path for path in found if path.name in named]


def tensors(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the header's entry of every tensor in a model's safetensors files."""
    for path in _files(folder):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = orjson.loads(file.read(length))
        yield from ((name, entry) for name, entry in header.items() if name != "__metadata__")


def count_parameters(folder: Path) -> int | None:
    """Return the number of parameters in a folder's files; None if they cannot be read."""
    try:
        return sum(math.prod(entry["shape"]) for _, entry in tensors(folder)) or None
    except _UNREADABLE:
        return None


def matrices(folder: Path) -> dict[str, int]:
    """Return the largest possible rank of a model's matrices, by the last part of a layer's name.

    Empty if the weights cannot be read: loading the model reports the reason.
    """
    ranks: dict[str, int] = {}
    try:
        for name, entry in tensors(folder):
            parts, shape = name.split("."), entry["shape"]
            if len(parts) > 1 and parts[-1] == "weight" and len(shape) == 2:
                ranks[parts[-2]] = max(ranks.get(parts[-2], 0), min(shape))
    except _UNREADABLE:
        return {}
    return ranks
