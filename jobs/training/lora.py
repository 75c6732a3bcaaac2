"""LoRA training: an adapter of PEFT on a frozen model (Hu et al. 2021, arXiv:2106.09685).

Imports torch and peft: only `run` of a kind imports it.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any, cast

import orjson
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor

from ..compute.frozen_int8 import quantize_linears
from ..compute.levels import levels, why_not
from ..context import Context, WarmModel
from ..errors import JobFailed
from ..models.adapters import BASE_DIGEST, BASE_PRECISION, CONFIG, is_adapter
from .deprecations import no_deprecations
from .options import ALL_LINEAR, NOT_ON_ADAPTER, TrainingSpec

# Optimal learning rates of LoRA are about ten times those of full training, for any rank:
# Schulman et al., "LoRA Without Regret" (Thinking Machines Lab, 2025), with lora_alpha 32.
LEARNING_RATE_FACTOR = 10.0
_FAR_OFF = 10.0  # a learning rate this many times above or below the default gives a warning


def with_adapter(warm: WarmModel, model: Any, spec: TrainingSpec) -> PeftModel:
    """Return `model` (of `warm`) with a new adapter to train and its own weights frozen.

    The adapter begins as PEFT's does: B is zero, A is drawn from the job's seed. Raises JobFailed.
    """
    if is_adapter(warm.path):
        raise JobFailed(f"lora: {NOT_ON_ADAPTER}")
    if spec.base_precision == "int8":
        _quantize(model)
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    for name, module in model.named_modules():
        if module in ends and name.rpartition(".")[2] in spec.lora_targets:
            raise JobFailed("lora_targets: must not be the embeddings or the vocabulary head")
    assert spec.lora is not None
    config = LoraConfig(
        r=spec.lora,
        lora_alpha=spec.lora_alpha,
        target_modules=_targets(spec.lora_targets),
        lora_dropout=spec.lora_dropout,
        task_type="CAUSAL_LM" if model.can_generate() else None,
    )
    with torch.random.fork_rng(), no_deprecations():
        # PEFT reports that GPT-2 stores its weights transposed.
        warnings.filterwarnings("ignore", "fan_in_fan_out", UserWarning)
        torch.manual_seed(spec.seed)
        try:
            wrapped = get_peft_model(model, config)
        except ValueError as error:
            reason = str(error).partition("\n")[0]
            raise JobFailed(f"lora_targets: must be layers of the model: {reason}") from error
    config.base_model_name_or_path = str(warm.path.absolute())
    wrapped.base_weights_digest = cast(Any, warm.weights_digest)  # torch types attributes
    wrapped.base_precision = cast(Any, spec.base_precision)
    return wrapped


def without_dropout(model: Any) -> None:
    """Turn all dropout off, as TRL does where two models are compared."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def set_dropout(model: Any, probability: float) -> None:
    """Set the dropout of a new adapter's layers, but not that of the base model."""
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for dropout in layer.lora_dropout.values():
                cast(torch.nn.Dropout, dropout).p = probability


def _quantize(model: Any) -> None:
    """Quantize the model's linear layers to int8, except the vocabulary head. Raises JobFailed.

    Also where int8 is not faster: the trained weights must not depend on the machine.
    """
    if model.device.type != "cpu":
        raise JobFailed(f"base_precision: must be native on a GPU ({model.device}), got int8")
    if levels().int8 is None:
        raise JobFailed(f"base_precision: must be native on this machine: {why_not('int8')}")
    if quantize_linears(model, kept=model.get_output_embeddings()) == 0:
        kind = model.config.model_type
        raise JobFailed(f"base_precision: must be native for a {kind}, which has no linear layers")


def _targets(names: tuple[str, ...]) -> str | list[str]:
    return ALL_LINEAR if names == (ALL_LINEAR,) else list(names)


def write_adapter_config(model: PeftModel, folder: Path) -> None:
    """Write adapter_config.json: the same bytes for the same adapter."""
    settings = model.peft_config["default"].to_dict() | {"inference_mode": True}
    plain = {
        name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()
    }
    options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS
    (folder / CONFIG).write_bytes(orjson.dumps(plain, option=options))


def adapter_metadata(model: PeftModel) -> dict[str, str]:
    """Return the metadata of the adapter's file: digest and precision of its base, if known."""
    digest = getattr(model, "base_weights_digest", None)
    known = {BASE_DIGEST: digest, BASE_PRECISION: getattr(model, "base_precision", None)}
    return {"format": "pt"} | {name: str(value) for name, value in known.items() if value}


def adapter_tensors(model: PeftModel) -> dict[str, Tensor]:
    """Return the adapter's weights by their names in a file of PEFT."""
    tensors: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return tensors


def chosen_learning_rate(
    spec: TrainingSpec, ctx: Context, full: float, *, most: float = math.inf
) -> float:
    """Return the learning rate of a job; `full` is the default of training all weights.

    `most`: the largest default of LoRA. Warns of a rate for LoRA that is far from its default.
    """
    if spec.lora is None:
        return spec.learning_rate or full
    usual = min(LEARNING_RATE_FACTOR * full, most)
    rate = spec.learning_rate or usual
    if not usual / _FAR_OFF < rate < usual * _FAR_OFF:
        ctx.emit(
            "warning",
            message=f"learning_rate: {rate:g} is far from {usual:g}, the default of LoRA for this "
            "model",
        )
    return rate
