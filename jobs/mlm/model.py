"""The tokenizer and the model of an MLM job: existing or new ones.

Imports torch and transformers: only `run` of the MLM kind imports it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForMaskedLM

from ..codegraph.encoder import CodeGraphConfig, CodeGraphEncoder, new_encoder
from ..context import WarmModel
from ..errors import JobFailed
from ..models import pretrained_tokenizer
from ..models.context_length import positions
from ..models.vocabulary import Vocabulary
from ..models.weight_headers import listed
from .options import CODE_GRAPH, GRAPH, MlmSpec, read_architecture


def given_tokenizer(spec: MlmSpec, warm: WarmModel | None) -> Any | None:
    """Return the tokenizer that the spec names, or None if one is to be trained.

    Raises JobFailed.
    """
    if spec.tokenizer == "train":
        return None
    if spec.tokenizer not in (None, "own"):
        return read_tokenizer(Path(str(spec.tokenizer)))
    if warm is not None:
        return warm.tokenizer
    if spec.architecture == CODE_GRAPH:
        return None
    folder = _folder(spec.architecture)
    has_own = any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
    return read_tokenizer(folder) if has_own or spec.tokenizer == "own" else None


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in a folder. Raises JobFailed."""
    try:
        return pretrained_tokenizer.read_tokenizer(folder)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise JobFailed(f"tokenizer: cannot be read from {folder}: {reason}") from error


def model_to_train(
    spec: MlmSpec, warm: WarmModel | None, tokenizer: Any, *, is_trained: bool, device: str
) -> Any:
    """Return the model to train, in float32. Raises JobFailed when it does not fit the rest.

    `is_trained`: the tokenizer is a new one, for which a new model is created. `device`: of a new
    model; a warm one is there.
    """
    if warm is None:
        # Drawn on the CPU: the same weights on every device.
        model = _new_model(spec, tokenizer, is_trained=is_trained).to(device)
    else:
        model = warm.model
    model = model.float()
    if isinstance(model, CodeGraphEncoder) is not (spec.objective == GRAPH):
        raise JobFailed(f"objective: {spec.objective} is not for a {type(model).__name__}")
    if tokenizer.mask_token_id is None:
        raise JobFailed("tokenizer: must have a mask token, got none")
    vocabulary = Vocabulary.of(str(spec.model), model, tokenizer)
    if beyond := vocabulary.beyond(tokenizer):
        raise JobFailed(
            f"tokenizer: must have at most {vocabulary.size} tokens (those of the model), got "
            f"{len(beyond)} without an embedding: {listed(beyond)}"
        )
    limit = positions(model)
    if limit is not None and spec.seq_len > limit:
        raise JobFailed(f"seq_len: must be at most {limit} for this model, got {spec.seq_len}")
    if spec.dropout is not None:
        set_dropout(model, spec.dropout)
    if isinstance(model, CodeGraphEncoder):
        model.config.trained_length = max(model.config.trained_length or 0, spec.seq_len)
    return model.requires_grad_(True)


def _new_model(spec: MlmSpec, tokenizer: Any, *, is_trained: bool) -> Any:
    """Make a model with weights that follow from the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(spec.seed)
        if spec.architecture == CODE_GRAPH:
            return new_encoder(CodeGraphConfig(vocab_size=len(tokenizer), **spec.sizes))
        settings = read_architecture(spec.architecture) | spec.sizes
        if is_trained:
            # The tokens of the old vocabulary have no meaning any more.
            settings |= {
                "vocab_size": len(tokenizer),
                "pad_token_id": tokenizer.pad_token_id,
                "bos_token_id": tokenizer.cls_token_id,
                "eos_token_id": tokenizer.sep_token_id,
            }
        model_type = settings.pop("model_type")
        if model_type == CodeGraphConfig.model_type:
            return new_encoder(CodeGraphConfig.from_dict(settings))
        config = AutoConfig.for_model(model_type, **settings)
        return AutoModelForMaskedLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )


def set_dropout(model: Any, probability: float) -> None:
    """Set every dropout probability of a model."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, probability)
    for name, value in model.config.to_dict().items():
        if "dropout" in name and isinstance(value, float):
            setattr(model.config, name, probability)


def _folder(architecture: str) -> Path:
    path = Path(architecture)
    return path if path.is_dir() else path.parent
