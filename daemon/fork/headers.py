"""What the files of a model say of themselves, before anybody builds a model from them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

# Sizes in a config.json that some tensor of the model has as an extent, by the names that
# transformers uses for most of its architectures.
_EXTENTS = ("vocab_size", "hidden_size", "intermediate_size", "d_model", "n_embd", "ffn_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")


def tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the header's entry of every tensor in the folder's safetensors files."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = orjson.loads(file.read(length))
        yield from (entry for name, entry in header.items() if name != "__metadata__")


def check_sizes(folder: Path) -> None:
    """Raise ValueError when config.json asks for a model far larger than the weights there.

    Building such a model takes minutes, or all memory, before anybody misses its weights.
    """
    config = orjson.loads((folder / "config.json").read_bytes())
    shapes = [entry["shape"] for entry in tensors(folder)]
    if not shapes or not isinstance(config, dict):
        return  # in another format; or wrong, and transformers says how
    largest = max((extent for shape in shapes for extent in shape), default=0)
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for names, bound, what in (
            (_LAYERS, len(shapes), f"there are only {len(shapes)} tensors"),
            (_EXTENTS, largest, f"the largest extent of a tensor is {largest}"),
        ):
            for name in names:
                value = part.get(name)
                if isinstance(value, int) and value > bound:
                    raise ValueError(f"config.json says {name} {value}, but {what}")
