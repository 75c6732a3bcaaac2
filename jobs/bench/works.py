"""The workloads of `warmd bench`, by name: shapes of models and batches."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...configs.precision import NATIVE


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a qwen2 decoder, by default as wide as Qwen2-0.5B."""

    layers: int
    vocab_size: int = 151_936
    hidden_size: int = 896
    intermediate_size: int = 4864
    heads: int = 14
    key_value_heads: int = 2

    @property
    def head(self) -> int:
        """Number of weights of the vocabulary head, which is tied to the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Number of parameters: weights, biases of queries, keys and values, RMSNorm weights."""
        hidden = self.hidden_size
        kept = 2 * self.key_value_heads * (hidden // self.heads)  # keys and values
        attention = 2 * hidden * hidden + hidden + kept * (hidden + 1)
        layer = attention + 3 * hidden * self.intermediate_size + 2 * hidden
        return self.head + self.layers * layer + hidden

    def settings(self) -> dict[str, Any]:
        """Return the fields of transformers' config."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "tie_word_embeddings": True,
        }


_TINY = Shape(layers=1, vocab_size=512, hidden_size=64, intermediate_size=128, heads=4)


@dataclass(frozen=True, kw_only=True)
class GrpoWork:
    """One optimizer step of GRPO: one prompt, and a group of completions of equal length."""

    shape: Shape
    prompt: int  # tokens
    completion: int  # tokens
    generations: int
    accumulation: int = 1
    beta: float = 0.0
    rollout_dtype: str = "float32"  # precision of warmd's rollouts
    lora: int | None = None  # rank of an adapter of all linear layers; None: full training
    base_precision: str = NATIVE  # of warmd's frozen model, with an adapter

    def floor_s(self, parameters: int, flops: float, bytes_s: float, steps: int = 1) -> float:
        """Return the minimum seconds of a step: GEMMs, weight traffic of decoding, AdamW.

        The prompt counts once per group. Decoding reads every weight once per token. A frozen
        model has no gradients of weights and no AdamW; those of an adapter are neglected.
        """
        backbone = parameters - self.shape.head
        tokens = self.prompt + self.generations * (self.completion - 1)
        scored = self.generations * self.completion
        gemms = 3 if self.lora is None else 2  # forward, and one or two backward
        if self.beta:
            gemms += 1  # the reference's forward
        operations = 2 * gemms * (tokens * backbone + scored * self.shape.head)
        operations += 2 * self.prompt * backbone  # prefill
        head_bytes = 1 if self.rollout_dtype == "int8" else 4
        backbone_bytes = 1 if self.base_precision == "int8" else head_bytes
        read = (backbone * backbone_bytes + self.shape.head * head_bytes) * self.completion
        # AdamW reads four arrays and writes three.
        updated = 4 * 7 * parameters if self.lora is None else 0
        return operations / flops + (read + updated) / bytes_s


_FULL = GrpoWork(
    shape=Shape(layers=24), prompt=73, completion=64, generations=2, accumulation=2, beta=0.1
)
_LORA = replace(_FULL, lora=16)

GRPO = {
    "0.5b": _FULL,
    "0.5b-int8": replace(_FULL, rollout_dtype="int8"),
    "0.5b-lora": _LORA,
    "0.5b-lora-int8": replace(_LORA, base_precision="int8"),
    "4-layers": GrpoWork(shape=Shape(layers=4), prompt=128, completion=64, generations=8),
    "4-layers-long-prompt": GrpoWork(
        shape=Shape(layers=4), prompt=512, completion=32, generations=8
    ),
    "tiny": GrpoWork(shape=_TINY, prompt=8, completion=4, generations=2, beta=0.1),
    "tiny-lora": GrpoWork(shape=_TINY, prompt=8, completion=4, generations=2, beta=0.1, lora=4),
}


@dataclass(frozen=True, kw_only=True)
class RowsWork:
    """One optimizer step of SFT or DPO: records of random lengths.

    A record has a prompt and one completion, or two (DPO), which share the prompt.
    """

    shape: Shape
    rows: int  # records of a step
    prompt: tuple[int, int]  # least and most tokens
    completion: tuple[int, int]
    completions: int = 1  # of a prompt

    def lengths(self, steps: int) -> list[tuple[int, ...]]:
        """Draw the tokens of the prompt and of its completions for each record of some steps."""
        draw = random.Random(0)
        parts = (self.prompt, *[self.completion] * self.completions)
        return [tuple(draw.randint(*part) for part in parts) for _ in range(self.rows * steps)]

    def floor_s(self, parameters: int, flops: float, bytes_s: float, steps: int) -> float:
        """Return the minimum seconds of an average step: GEMMs and AdamW.

        The prompt counts once; the head counts at the tokens of completions.
        """
        lengths = self.lengths(steps)
        tokens = sum(sum(parts) - self.completions for parts in lengths) / steps
        scored = sum(sum(parts[1:]) for parts in lengths) / steps
        # One GEMM forward, two backward, and with two completions the reference's forward.
        gemms = 2 + self.completions
        backbone = parameters - self.shape.head
        operations = 2 * gemms * (tokens * backbone + scored * self.shape.head)
        # AdamW reads four arrays and writes three.
        return operations / flops + 4 * 7 * parameters / bytes_s


SFT = {
    "0.5b": RowsWork(shape=Shape(layers=24), rows=4, prompt=(40, 120), completion=(40, 220)),
    "4-layers": RowsWork(shape=Shape(layers=4), rows=8, prompt=(40, 120), completion=(40, 220)),
    "tiny": RowsWork(shape=_TINY, rows=2, prompt=(4, 8), completion=(2, 6)),
}

DPO = {
    "0.5b": replace(SFT["0.5b"], rows=2, completions=2),
    "4-layers": replace(SFT["4-layers"], rows=4, completions=2),
    "4-layers-long-prompt": RowsWork(
        shape=Shape(layers=4), rows=4, prompt=(400, 600), completion=(20, 100), completions=2
    ),
    "tiny": replace(SFT["tiny"], completions=2),
}


@dataclass(frozen=True, kw_only=True)
class MlmWork:
    """One micro-step of MLM: a forward and a backward pass over examples of equal length."""

    batch_size: int
    length: int  # tokens
    is_graph: bool = True  # the code-graph encoder; False: a BERT
    updates: int = 0  # whole updates that are measured to project `projected` of them; 0: none
    projected: int = 10_000
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the model's config


_SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}

MLM = {
    "encoder": MlmWork(batch_size=1, length=111),
    "encoder-8x128": MlmWork(batch_size=8, length=128, updates=50),
    "bert": MlmWork(batch_size=8, length=128, is_graph=False, settings={"num_hidden_layers": 4}),
    "tiny-encoder": MlmWork(batch_size=2, length=40, updates=3, projected=100, settings=_SMALL),
    "tiny-bert": MlmWork(batch_size=2, length=40, is_graph=False, settings=_SMALL),
}


@dataclass(frozen=True, kw_only=True)
class InferWork:
    """Greedy single-sequence decode of `completion` tokens after a prompt of `prompt` tokens."""

    shape: Shape
    prompt: int
    completion: int


# Bytes per weight; int4 with its share of the scale of 32 weights.
WEIGHT_BYTES = {NATIVE: 4, "bf16": 2, "int8": 1, "int4": 0.5 + 2 / 32}

INFER = {
    "0.5b": InferWork(shape=Shape(layers=24), prompt=32, completion=48),
    "tiny": InferWork(shape=_TINY, prompt=8, completion=8),
}


def usual(works: Mapping[str, Any]) -> list[str]:
    """Return the workloads that are measured by default: all but the tiny ones, for tests."""
    return [name for name in works if not name.startswith("tiny")]
