"""Small decoders of random weights, and prompts for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}


def make(name: str, **sizes: Any) -> Any:
    """A small model of random weights with biases where its kind has them."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **sizes})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith((".bias", "norm.weight")):
            torch.nn.init.normal_(parameter, mean=0.5)
    return model.requires_grad_(False).eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 80, (length,), generator=generator).tolist()


# Models that native kernels support: all sizes are multiples of 64.
NATIVE_SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
