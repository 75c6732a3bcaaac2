"""Small models of random weights, of many architectures."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 81, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
RECURRENT = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
             "linear_value_head_dim": 8, "head_dim": 8,
             "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
         "mamba_chunk_size": 8}  # fmt: skip

# Architectures that the engine's decoder computes -> config values in addition to SIZES.
DECODED: dict[str, dict[str, Any]] = {"Llama": {}, "Mistral": {}, "Qwen2": {}, "Qwen3": {}}
# All others that are tested.
OTHERS: dict[str, dict[str, Any]] = {
    "Bamba": {**MAMBA, "attn_layer_indices": [1]},
    "Bloom": {"n_head": 4, "n_layer": 2},
    "Cohere": {},
    "Falcon": {},
    "FalconMamba": {"state_size": 8},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "GPTNeo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    "GPTNeoX": {},
    "Gemma2": {"head_dim": 8, "sliding_window": 8},
    "GraniteMoeHybrid": {**MAMBA, "layer_types": ["mamba", "attention"],
                         "shared_intermediate_size": 64, "num_local_experts": 4,
                         "num_experts_per_tok": 2},
    "JetMoe": {"num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4,
               "num_experts_per_tok": 2},
    "Mamba": {"state_size": 8},
    "Mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "Mixtral": {"num_local_experts": 4},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "OpenAIGPT": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "Persimmon": {},
    "Phi3": {},
    "Qwen3Next": {**MIXTURE, **RECURRENT, "shared_expert_intermediate_size": 32},
    "Qwen3_5": {**RECURRENT},
    "RecurrentGemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16,
                       "num_key_value_heads": 1},
    "Rwkv": {"attention_hidden_size": 32, "context_length": 128},
    "StableLm": {},
}  # fmt: skip


def make(kind: str) -> Any:
    """A small model of random weights."""
    torch.manual_seed(0)
    name = f"{kind}TextConfig" if hasattr(transformers, f"{kind}TextConfig") else f"{kind}Config"
    config = getattr(transformers, name)(**{**SIZES, **(DECODED | OTHERS)[kind]})
    head = f"{kind}ForCausalLM"
    name = head if hasattr(transformers, head) else f"{kind}LMHeadModel"
    return getattr(transformers, name)(config).requires_grad_(False).eval()


def bert(name: str) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=81, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32,
    )  # fmt: skip
    return getattr(transformers, name)(config).eval()


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=81, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    model: Any = transformers.T5ForConditionalGeneration(config)
    return model.eval()
