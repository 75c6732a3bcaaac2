"""LoRA adapters, as PEFT writes them: folders that name a base model and change some weights of it.

What is warm is the base model with W + B A alpha / r in the place of W: nothing else has to know
of adapters then. All other kinds, and what LoRA may have beside A and B, are refused by name.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import orjson

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

# Settings of PEFT's LoRA under which a weight is more than W + B A alpha / r.
_NOT_PLAIN = (
    "alora_invocation_tokens", "alpha_pattern", "bias", "corda_config", "fan_in_fan_out",
    "layer_replication", "lora_bias", "megatron_config", "modules_to_save", "rank_pattern",
    "target_parameters", "trainable_token_indices", "use_dora", "use_qalora",
)  # fmt: skip
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model of its own."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def model_folder(folder: Path) -> Path:
    """Return the folder of the model that is to be built: an adapter's base, or `folder` itself.

    Raises ValueError when the base is not a folder on this disk.
    """
    if not is_adapter(folder):
        return folder
    named = str(_settings(folder).get("base_model_name_or_path"))
    base = folder / Path(named).expanduser()
    if not (base / "config.json").is_file():
        raise ValueError(f"{CONFIG} says base_model_name_or_path {named!r}: no model folder there")
    return base


def merge(model: Any, folder: Path) -> None:
    """Change the weights of the base model to those that the adapter makes of them.

    Raises ValueError for what is not plain LoRA, or not made for this model.
    """
    import torch
    from safetensors.torch import load_file

    scaling = _scaling(_settings(folder))
    layers: dict[str, dict[str, Any]] = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{WEIGHTS} has {name}: only A and B of plain LoRA can be merged")
        layers.setdefault(match[1], {})[match[2]] = tensor
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, factors in layers.items():
            layer = modules.get(name)
            if not isinstance(layer, torch.nn.Linear) or factors.keys() != {"A", "B"}:
                raise ValueError(f"{WEIGHTS} has {name}: the model has no such linear layer")
            weight = layer.weight
            a, b = factors["A"], factors["B"]
            if (b.shape[0], a.shape[1]) != tuple(weight.shape) or b.shape[1] != a.shape[0]:
                raise ValueError(
                    f"{WEIGHTS} has {name} of {tuple(b.shape)} by {tuple(a.shape)}, "
                    f"the model's is {tuple(weight.shape)}"
                )
            # As PEFT merges: the product in float32, one rounding at the end. A new tensor: the
            # old one may be mapped from the base's file, or be that of another layer, too.
            merged = torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)
            layer.weight = torch.nn.Parameter(merged.to(weight.dtype), requires_grad=False)


def _settings(folder: Path) -> dict[str, Any]:
    settings = orjson.loads((folder / CONFIG).read_bytes())
    if not isinstance(settings, dict):
        raise ValueError(f"{CONFIG} is no JSON object")
    return settings


def _scaling(settings: dict[str, Any]) -> float:
    """alpha / r, or alpha / sqrt(r) with rslora (arXiv:2312.03732)."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{CONFIG} says peft_type {kind}: only LORA can be served")
    for name in _NOT_PLAIN:
        if settings.get(name) not in (None, False, {}, [], "none"):
            raise ValueError(
                f"{CONFIG} says {name} {settings[name]}: only plain LoRA can be served"
            )
    alpha, rank = settings.get("lora_alpha"), settings.get("r")
    if not isinstance(alpha, int | float) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{CONFIG} says r {rank} and lora_alpha {alpha}: it must have both")
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)
