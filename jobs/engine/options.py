"""The sampling options that every kind that generates text has. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ...configs.precision import FORMER_NAMES, PRECISIONS
from ..spec import Spec, option

MOST_TOKENS = 2**31  # more than any model has positions, or tokens in its vocabulary


@dataclass(frozen=True, kw_only=True)
class SamplingSpec(Spec):
    """Options for sampling the next token."""

    temperature: float = option(
        1.0, "sampling temperature (0: greedy)", group="sampling", minimum=0, maximum=100
    )
    top_p: float = option(
        1.0, "nucleus sampling probability (top-p)", group="sampling", above=0, maximum=1
    )
    top_k: int = option(
        0,
        "number of most likely tokens from which the next one is sampled (top-k; 0: all)",
        group="sampling",
        minimum=0,
        maximum=MOST_TOKENS,
    )


@dataclass(frozen=True, kw_only=True)
class PrecisionSpec(SamplingSpec):
    """Options of kinds that generate in a precision of their own."""

    precision: str | None = option(
        None,
        "precision of the computation; native: the dtype of the model; bf16: where it is faster, "
        "on a CPU by measurement; int8, int4: W8A8 and W4A8 dynamic quantization on a CPU, bf16 on "
        "a GPU",
        group="model",
        default_text="as the model was loaded",
        choices=PRECISIONS,
        names=FORMER_NAMES,
    )
