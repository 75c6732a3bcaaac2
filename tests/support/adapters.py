"""Adapters as PEFT writes them, far from their base."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def lora(*targets: str, **settings: Any) -> peft.LoraConfig:
    names = list(targets or ("q_proj", "down_proj"))
    return peft.LoraConfig(r=2, lora_alpha=6, lora_dropout=0.1, target_modules=names, **settings)


def write_adapter(
    folder: Path, base: Path, config: Any, *, dtype: Any = torch.float32, seed: int = 1
) -> Any:
    """Have PEFT make an adapter that changes the base far; return the logits of the PeftModel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT: of what may go wrong with tied layers
        torch.manual_seed(0)  # PEFT begins from random numbers
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        wrapped = peft.get_peft_model(model, config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in wrapped.parameters():
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter += 0.3 * noise.to(parameter.dtype)
            logits = wrapped(IDS).logits
        wrapped.save_pretrained(folder)
    return logits
