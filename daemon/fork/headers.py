"""Checks of a model's files by config.json and headers, before a model is built from them."""

from __future__ import annotations

from pathlib import Path

from ...jobs.models.folder_checks import check_folder
from ...jobs.models.folder_files import read_json
from ...jobs.models.model_types import check_type
from ...jobs.models.weight_headers import tensors

# Sizes in a config.json that some tensor of the model has as an extent, by the names that
# transformers uses for most of its architectures.
_EXTENTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "d_model", "n_embd", "ffn_dim"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "n_head"),
)
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")


def check_loadable(folder: Path) -> None:
    """Raise ValueError for a model that cannot be loaded, by its config.json and its headers.

    Quantized weights and a model's own code are not supported. A config.json that describes a much
    larger model than the weights would take minutes, or all memory, before the error shows, and so
    would weights none of which fits.
    """
    config = read_json(folder / "config.json")
    check_type("config.json", config)
    if config.get("quantization_config") is not None:
        # Its loader would initialize CUDA in the zygote, or need a package that is not there.
        raise ValueError("its weights are quantized: must be float32, bfloat16 or float16")
    check_folder(folder)
    shapes = [entry["shape"] for _, entry in tensors(folder)]
    if not shapes:
        return  # in another format
    largest = max((extent for shape in shapes for extent in shape), default=0)
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for names, bound, what in (
            (_LAYERS, len(shapes), "the number of tensors"),
            (_EXTENTS, largest, "the largest extent of a tensor"),
        ):
            for name in names:
                value = part.get(name)
                if isinstance(value, int) and value > bound:
                    raise ValueError(
                        f"config.json: {name} must be at most {bound}, {what}, got {value}"
                    )
