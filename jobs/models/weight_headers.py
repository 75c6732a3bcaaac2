"""Names and shapes of a model's weights, from the headers of its safetensors files.

Imports no torch; the weights themselves are not read.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from .folder_files import (
    MOST_JSON,
    BadFile,
    check_not_pointer,
    check_regular,
    opened,
    read_json,
    shown,
)

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

# Bits of a value, by the type's name in the format (https://huggingface.co/docs/safetensors).
_BITS = {
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
_LENGTH_BYTES = 8  # of the length of the header, in front of it
_MOST_HEADER = 100_000_000  # bytes; the library reads no larger one
_MOST_TENSORS = 200_000  # in a file; the largest known model has half of them in all its files

_UNREADABLE = (OSError, ValueError)  # there is none, or it is damaged


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

    These are damaged headers and indexes, weights that were saved in a wrapper, an index that names
    tensors which its files lack, and weights that are integers.
    """
    wanted = {} if (folder / WHOLE).is_file() else weight_map(folder)
    types = {name: entry["dtype"] for name, entry in tensors(folder)}
    held = set(types)
    absent = sorted(set(wanted) - held)
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


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that are loaded: a folder may have copies in other layouts."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    found = sorted(folder.glob("*.safetensors"))
    named = set(weight_map(folder).values())
    return [path for path in found if path.name in named] if named else found


def weight_map(folder: Path, index: str = INDEX) -> dict[str, str]:
    """Return the file of each tensor by the index; empty without one. Raises BadFile, OSError."""
    if not os.path.lexists(folder / index):
        return {}
    found = read_json(folder / index, MOST_JSON).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise BadFile(index, "weight_map", "an object with the file of each tensor", shown(found))
    for name, file in found.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise BadFile(index, f"weight_map.{name}", "the name of a file", shown(file))
    return found


def tensors(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the header's entry of every tensor in a model's safetensors files.

    Raises BadFile for a damaged one, and OSError.
    """
    for path in weight_files(folder):
        yield from header(path).items()


def header(path: Path) -> dict[str, dict[str, Any]]:
    """Return the checked header of a safetensors file: dtype, shape and data_offsets by tensor.

    Raises BadFile naming the field for a file that the library would not load, and OSError.
    """
    name = path.name
    check_regular(path)
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = file.read(_LENGTH_BYTES)
        check_not_pointer(name, begin)
        length = int.from_bytes(begin, "little")
        most = min(_MOST_HEADER, size - _LENGTH_BYTES)
        if len(begin) < _LENGTH_BYTES:
            raise BadFile(name, "", "a safetensors file", f"one of {size} bytes")
        if length > most:
            takes = f"at most {most:,}, by the size of the file"
            raise BadFile(name, "the length of the header", takes, f"{length:,}")
        content = file.read(length)
    objects = content.count(b"{")  # before they are parsed: one for each tensor, and two more
    if objects > _MOST_TENSORS:
        raise BadFile(name, "the header", f"of at most {_MOST_TENSORS:,} tensors", f"{objects:,}")
    try:
        found = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise BadFile(name, "the header", "JSON", f"text that is not: {error}") from error
    if not isinstance(found, dict):
        raise BadFile(name, "the header", "an object", shown(found))
    metadata = found.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())
    ):
        raise BadFile(name, "__metadata__", "an object with texts", shown(metadata))
    _check_entries(name, found, size - _LENGTH_BYTES - length)
    return found


def _check_entries(file: str, entries: dict[str, Any], num_bytes: int) -> None:
    """Check the entries of a header, whose tensors must fill `num_bytes` without gaps."""
    places = []
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            raise BadFile(file, name, "an object", shown(entry))
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in _BITS:
            raise BadFile(file, f"{name}.dtype", f"one of {', '.join(_BITS)}", shown(dtype))
        if not isinstance(shape, list) or not all(map(_is_size, shape)):
            raise BadFile(file, f"{name}.shape", "a list of numbers from 0", _values(shape))
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
            raise BadFile(file, f"{name}.data_offsets", "two numbers from 0", _values(offsets))
        begin, end = offsets
        num_bits = math.prod(shape) * _BITS[dtype]
        if (end - begin) * 8 != num_bits:
            takes = f"{num_bits // 8} bytes apart, for {_values(shape)} of {dtype}"
            raise BadFile(file, f"{name}.data_offsets", takes, _values(offsets))
        places.append((begin, end, name))
    last = 0
    for begin, end, name in sorted(places):
        if begin != last:
            takes = f"from {last}, where the tensor before ends"
            raise BadFile(file, f"{name}.data_offsets", takes, f"[{begin}, {end}]")
        last = end
    if last != num_bytes:
        takes = f"a file with {last:,} bytes of tensors, by its header"
        raise BadFile(file, "", takes, f"{num_bytes:,}: copy or save it again")


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _values(values: Any) -> str:
    return shown(str(values)).strip("'") if isinstance(values, list) else shown(values)


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
