"""What llama.cpp needs to know of a decoder besides its tensors, by the model's config.json.

The keys of hyperparameters and the names of tensors are the package `gguf`'s. What its graphs of
these architectures fix and a config may set otherwise is refused: they would compute something
else.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import SpecError

# By model_type: the architecture in GGUF, and the activation that its graph has.
_DECODERS = {
    "llama": ("llama", "silu"),
    "mistral": ("llama", "silu"),
    "qwen2": ("qwen2", "silu"),
    "qwen3": ("qwen3", "silu"),
    "gemma2": ("gemma2", "gelu_pytorch_tanh"),
}
# In these, llama.cpp rotates neighboring values of a head, where transformers rotates its halves.
_ROTATES_NEIGHBORS = ("llama",)
_BIASES = {  # settings of biases, and the only value that a graph has
    "llama": {},
    "qwen2": {},
    "qwen3": {"attention_bias": False},
    "gemma2": {"attention_bias": False},
}

Array = np.ndarray[Any, Any]


class Decoder:
    """The hyperparameters of a decoder, and its tensors as llama.cpp expects them."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Raises SpecError for a config that llama.cpp's graph does not compute."""
        kind = config.get("model_type")
        if kind not in _DECODERS:
            raise _refused("model_type", f"one of {', '.join(_DECODERS)}", kind)
        self.architecture, activation = _DECODERS[str(kind)]
        self._config = config
        if config.get("quantization_config"):
            raise _refused("quantization_config", "absent", "one")
        for name in ("hidden_act", "hidden_activation"):
            if config.get(name, activation) not in (activation, None):
                raise _refused(name, activation, config[name])
        for name, value in _BIASES[self.architecture].items():
            if config.get(name, value) != value:
                raise _refused(name, value, config[name])
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config.get("num_key_value_heads") or self.heads
        self.head_size: int = config.get("head_dim") or config["hidden_size"] // self.heads
        self.layers: int = config["num_hidden_layers"]
        self.is_tied = bool(config.get("tie_word_embeddings", self.architecture == "gemma2"))
        self.notes: list[str] = []
        self.context: int = config["max_position_embeddings"]
        self._rope = self._rope_settings()
        if self.architecture == "gemma2":
            self._check_gemma()
        else:
            self._limit_to_window()

    def write(self, writer: Any) -> None:
        """Add the hyperparameters to a gguf.GGUFWriter."""
        import gguf  # type: ignore[import-not-found, unused-ignore]

        config = self._config
        writer.add_context_length(self.context)
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_block_count(self.layers)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_size)
        writer.add_value_length(self.head_size)
        writer.add_rope_dimension_count(self.head_size)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_freq_base(float(self._rope.get("rope_theta", 10_000.0)))
        if self._rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(float(self._rope["factor"]))
        if self.architecture == "gemma2":
            writer.add_attn_logit_softcapping(float(config["attn_logit_softcapping"]))
            writer.add_final_logit_softcapping(float(config["final_logit_softcapping"]))
            writer.add_sliding_window(config["sliding_window"])

    def converted(self, name: str, tensor: Array) -> Array:
        """Return a tensor of transformers, a weight or a bias by its name, as llama.cpp reads it.

        `tensor` is float32: rows are outputs.
        """
        if self.architecture == "gemma2" and name.endswith("norm.weight"):
            return tensor + np.float32(1)  # transformers adds it in each forward pass
        if self.architecture in _ROTATES_NEIGHBORS:
            if ".q_proj." in name:
                return _interleaved(tensor, self.heads)
            if ".k_proj." in name:
                return _interleaved(tensor, self.kv_heads)
        return tensor

    def extra_tensors(self) -> dict[str, Array]:
        """Return tensors by their name in GGUF that follow from the config alone."""
        if self._rope["rope_type"] != "llama3":
            return {}
        return {"rope_freqs.weight": self._divisors()}

    def _rope_settings(self) -> dict[str, Any]:
        """Return the settings of the rotary position embedding, of transformers 4 or 5."""
        config = self._config
        old = config.get("rope_scaling") or {}
        found = {"rope_theta": config.get("rope_theta", 10_000.0), **old}
        found |= config.get("rope_parameters") or {}
        found["rope_type"] = found.get("rope_type") or old.get("type") or "default"
        takes = ("default", "linear", "llama3")
        if found["rope_type"] not in takes:
            raise _refused("rope_type", f"one of {', '.join(takes)}", found["rope_type"])
        if found.get("partial_rotary_factor", 1.0) != 1.0 or config.get("partial_rotary_factor"):
            raise _refused("partial_rotary_factor", "absent", found.get("partial_rotary_factor"))
        return found

    def _divisors(self) -> Array:
        """Return what each frequency is divided by, of Llama 3's scaling: (head size / 2,)."""
        rope, pi2 = self._rope, 2 * math.pi
        factor, original = rope["factor"], rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        found = []
        for index in range(0, self.head_size, 2):
            wavelength = pi2 * rope["rope_theta"] ** (index / self.head_size)
            between = (original / wavelength - low) / (high - low)
            share = min(max(between, 0.0), 1.0)  # of the frequency that is kept
            found.append(1 / ((1 - share) / factor + share))
        return np.array(found, dtype=np.float32)

    def _limit_to_window(self) -> None:
        """Attention is full in these graphs: the context ends where a window would begin."""
        config = self._config
        window = config.get("sliding_window")
        if config.get("model_type") != "mistral" and not config.get("use_sliding_window"):
            return
        if window and window < self.context:
            self.context = window
            self.notes.append(
                f"context: {window} tokens, those of sliding_window, which llama.cpp does not "
                "apply in this architecture"
            )

    def _check_gemma(self) -> None:
        config = self._config
        kinds = config.get("layer_types")
        alternating = ["sliding_attention", "full_attention"] * self.layers
        if kinds is not None and list(kinds) != alternating[: self.layers]:
            raise _refused("layer_types", "sliding and full attention in turns", kinds)
        scale = config.get("query_pre_attn_scalar", self.head_size)
        if scale != self.head_size:
            raise _refused("query_pre_attn_scalar", f"head_dim ({self.head_size})", scale)
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if not config.get(name):
                raise _refused(name, "a number", config.get(name))
        if not self.is_tied:
            raise _refused("tie_word_embeddings", True, False)
        if config.get("use_bidirectional_attention"):
            raise _refused("use_bidirectional_attention", "absent", True)


def _interleaved(tensor: Array, heads: int) -> Array:
    """Return the rows of each head so that the two halves that rotate together alternate."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _refused(name: str, takes: object, got: object) -> SpecError:
    return SpecError("gguf", f"config.json: {name} must be {takes} for llama.cpp, got {got}")
