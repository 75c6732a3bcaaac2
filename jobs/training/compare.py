"""Bitwise comparison of two checkpoints, or of the events of two runs.

`python -m warmd.jobs.training.compare A B` compares checkpoints in a separate process, which
imports torch only for files whose bytes differ (equal values may be pickled in two ways).
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from ..context import MANIFEST
from ..errors import CheckpointDamaged

_MISSING = object()  # None is a value

# Event fields that depend on the clock, not on the computation.
_TIMING = frozenset(("seq", "execution", "time", "seconds"))


def is_timing(name: str) -> bool:
    """Whether a field of an event, or a metric, depends on the clock."""
    return name in _TIMING or name.endswith("_s")


def compare_events(
    one: Iterable[Mapping[str, Any]], other: Iterable[Mapping[str, Any]]
) -> tuple[int, str | None]:
    """Return how many steps were compared, and the first difference between them."""
    steps, others = _steps(one), _steps(other)
    for key in sorted({*steps, *others}):
        problem = _first_difference(
            steps.get(key, _MISSING), others.get(key, _MISSING), f"{key[1]} {key[0]}"
        )
        if problem is not None:
            return len(steps), problem
    return len(steps), None


def _steps(events: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str], dict[str, Any]]:
    return {
        (event["step"], event["type"]): {k: v for k, v in event.items() if not is_timing(k)}
        for event in events
        if event["type"] in ("step", "eval") and event["step"] is not None
    }


def compare_checkpoints(one: Path, other: Path) -> dict[str, str | None]:
    """Return the first difference in each file of two checkpoints, None if there is none.

    Imports torch when the bytes of a file differ.
    """
    names = sorted({*_names(one), *_names(other)})
    return {name: _compare_files(one / name, other / name) for name in names}


def _names(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file() and path.name != MANIFEST:
            yield str(path.relative_to(folder))


def _compare_files(one: Path, other: Path) -> str | None:
    if not (one.is_file() and other.is_file()):
        return f"only in {one.parent if one.is_file() else other.parent}"
    if _same_bytes(one, other):
        return None
    if one.suffix not in _READERS:
        return f"{one.stat().st_size} and {other.stat().st_size} bytes that differ"
    read = _READERS[one.suffix]
    return _first_difference(read(one), read(other), "")


def _same_bytes(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as first, other.open("rb") as second:
        while block := first.read(1 << 22):
            if block != second.read(1 << 22):
                return False
    return True


def _read_tensors(path: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(path)


def _read_state(path: Path) -> Any:
    import numpy as np
    import torch

    # The state of numpy's generator, an array, is not a plain value.
    array = np.zeros(1, np.uint32)
    known: list[Any] = [array.__reduce__()[0], np.ndarray, np.dtype, type(array.dtype)]
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointDamaged(f"{path}: holds more than values, and is not read") from error


_READERS: dict[str, Callable[[Path], Any]] = {
    ".safetensors": _read_tensors,
    ".pt": _read_state,
    ".pth": _read_state,
    ".json": lambda path: orjson.loads(path.read_bytes()),
}


def _first_difference(one: Any, other: Any, where: str) -> str | None:
    """Return the place of the first difference; NaN equals NaN, 0.0 does not equal -0.0."""
    if one is _MISSING or other is _MISSING:
        return f"{where}: only in one"
    if type(one) is not type(other):
        return f"{where}: {type(one).__name__} and {type(other).__name__}"
    if isinstance(one, dict):
        keys = sorted({*one, *other}, key=str)
        pairs = [
            (k, one.get(k, _MISSING), other.get(k, _MISSING)) for k in keys if not is_timing(str(k))
        ]
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            return f"{where}: {len(one)} and {len(other)} values"
        pairs = [(i, *pair) for i, pair in enumerate(zip(one, other, strict=True))]
    elif hasattr(one, "dtype"):  # of torch or numpy
        return _array_difference(one, other, where)
    else:
        same = repr(one) == repr(other)
        return None if same else f"{where}: {str(one)[:40]} and {str(other)[:40]}"
    found = (
        _first_difference(a, b, f"{where}.{key}" if where else str(key)) for key, a, b in pairs
    )
    return next((problem for problem in found if problem is not None), None)


def _array_difference(one: Any, other: Any, where: str) -> str | None:
    import torch

    if (one.shape, one.dtype) != (other.shape, other.dtype):
        shapes = [f"{tuple(value.shape)} {value.dtype}" for value in (one, other)]
        return f"{where}: {shapes[0]} and {shapes[1]}"
    if not one.shape or 0 in one.shape:
        return _first_difference(one.tolist(), other.tolist(), where)
    first, second = (torch.as_tensor(value).contiguous().reshape(-1) for value in (one, other))
    different = (first.view(torch.uint8) != second.view(torch.uint8)).reshape(len(first), -1)
    count = int(different.any(dim=1).sum())
    return f"{where}: {count} of {len(first)} values" if count else None


def main() -> None:
    """Print what `compare_checkpoints` returns, as JSON."""
    one, other = map(Path, sys.argv[1:])
    sys.stdout.buffer.write(orjson.dumps(compare_checkpoints(one, other)))


if __name__ == "__main__":
    main()
