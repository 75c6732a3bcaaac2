"""The works that `warmd bench` measures, by name: shapes of models and batches."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...configs.precision import NATIVE


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder of transformers' qwen2, by default as wide as Qwen2-0.5B."""

    layers: int
    vocab_size: int = 151_936
    hidden_size: int = 896
    intermediate_size: int = 4864
    heads: int = 14
    key_value_heads: int = 2

    @property
    def head(self) -> int:
        """The weights of the vocabulary head, which the embeddings share."""
        return self.vocab_size * self.hidden_size

    def settings(self) -> dict[str, Any]:
        """Return what transformers' config of it is made from."""
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
    """One optimizer step: a group of completions for one prompt, all of the same length."""

    shape: Shape
    prompt: int  # tokens
    completion: int  # tokens
    generations: int
    accumulation: int = 1
    beta: float = 0.0
    rollout_dtype: str = "float32"  # of warmd's side: what completions are written by

    def floor_s(self, parameters: int, flops: float, bytes_s: float) -> float:
        """Return the seconds that a step's products, decoding reads and AdamW take at least.

        The prompt counts once for its group; of decoding, every weight is read for each token.
        """
        backbone = parameters - self.shape.head
        tokens = self.prompt + self.generations * (self.completion - 1)
        scored = self.generations * self.completion
        passes = 3 if self.beta == 0 else 4  # forward, two products backward; the reference
        operations = 2 * passes * (tokens * backbone + scored * self.shape.head)
        operations += 2 * self.prompt * backbone  # read once for the writing
        written_by = 1 if self.rollout_dtype == "int8" else 4  # bytes of a weight
        # AdamW reads four arrays and writes three.
        moved = parameters * (written_by * self.completion + 4 * 7)
        return operations / flops + moved / bytes_s


GRPO = {
    "0.5b": GrpoWork(
        shape=Shape(layers=24), prompt=73, completion=64, generations=2, accumulation=2, beta=0.1
    ),
    "0.5b-int8": GrpoWork(
        shape=Shape(layers=24),
        prompt=73,
        completion=64,
        generations=2,
        accumulation=2,
        beta=0.1,
        rollout_dtype="int8",
    ),
    "4-layers": GrpoWork(shape=Shape(layers=4), prompt=128, completion=64, generations=8),
    "4-layers-long-prompt": GrpoWork(
        shape=Shape(layers=4), prompt=512, completion=32, generations=8
    ),
    "tiny": GrpoWork(shape=_TINY, prompt=8, completion=4, generations=2, beta=0.1),
}


@dataclass(frozen=True, kw_only=True)
class SftWork:
    """One optimizer step: rows of a prompt and a completion, of the lengths that are drawn."""

    shape: Shape
    rows: int
    prompt: tuple[int, int]  # least and most tokens
    completion: tuple[int, int]

    def lengths(self, steps: int) -> list[tuple[int, int]]:
        """Draw the tokens of prompt and completion of every row of so many steps."""
        draw = random.Random(0)
        return [
            (draw.randint(*self.prompt), draw.randint(*self.completion))
            for _ in range(self.rows * steps)
        ]

    def floor_s(self, parameters: int, flops: float, bytes_s: float, *, steps: int) -> float:
        """Return the seconds that a step's products and AdamW take at least, on average.

        The head counts at the tokens of completions, the other layers at all that are read.
        """
        lengths = self.lengths(steps)
        tokens = sum(prompt + completion - 1 for prompt, completion in lengths) / steps
        learned = sum(completion for _, completion in lengths) / steps
        # Forward, and two products backward.
        operations = 6 * (tokens * (parameters - self.shape.head) + learned * self.shape.head)
        # AdamW reads four arrays and writes three.
        return operations / flops + 4 * 7 * parameters / bytes_s


SFT = {
    "0.5b": SftWork(shape=Shape(layers=24), rows=4, prompt=(40, 120), completion=(40, 220)),
    "4-layers": SftWork(shape=Shape(layers=4), rows=8, prompt=(40, 120), completion=(40, 220)),
    "tiny": SftWork(shape=_TINY, rows=2, prompt=(4, 8), completion=(2, 6)),
}


@dataclass(frozen=True, kw_only=True)
class MlmWork:
    """One micro-step: so many examples of one length through a model, forward and backward."""

    rows: int
    length: int  # tokens
    is_graph: bool = True  # for the code-graph encoder, else for a BERT
    updates: int = 0  # whole ones to project `projected` from; 0: none
    projected: int = 10_000
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the model; else its usual ones


_SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}

MLM = {
    "encoder": MlmWork(rows=1, length=111),
    "encoder-8x128": MlmWork(rows=8, length=128, updates=50),
    "bert": MlmWork(rows=8, length=128, is_graph=False, settings={"num_hidden_layers": 4}),
    "tiny-encoder": MlmWork(rows=2, length=40, updates=3, projected=100, settings=_SMALL),
    "tiny-bert": MlmWork(rows=2, length=40, is_graph=False, settings=_SMALL),
}


@dataclass(frozen=True, kw_only=True)
class InferWork:
    """One request at a time: so many tokens written after a prompt, greedily."""

    shape: Shape
    prompt: int
    completion: int


WEIGHT_BYTES = {NATIVE: 4, "bf16": 2, "int8": 1}  # of one weight, in each precision

INFER = {
    "0.5b": InferWork(shape=Shape(layers=24), prompt=32, completion=48),
    "tiny": InferWork(shape=_TINY, prompt=8, completion=8),
}


def usual(works: Mapping[str, Any]) -> list[str]:
    """The works that are measured unless others are named: those of a size that is in use."""
    return [name for name in works if not name.startswith("tiny")]
