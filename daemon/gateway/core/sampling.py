"""What chat and text completions have in common: the options of a request and parts of an answer.

An option that would change the answer and is not served is refused, never passed over. Those that
say nothing about the answer are taken and forgotten.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_LONGEST_STOP = 16  # texts
_MOST_TOKENS = 2**31
_SEED_BITS = 62

# How the spec's options are called in a request.
OPTIONS = {
    "model": "model",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "stop": "stop",
    "seed": "seed",
    "n": "n",
}


def _off(value: object) -> object:
    """Take what asks for nothing as nothing: clients spell out defaults."""
    return None if value in (False, [], {}, 0, "none", "text") else value


Unserved = Annotated[None, BeforeValidator(_off), Field(description="Not served: leave it out.")]
Forgotten = Annotated[Any, Field(description="Taken and passed over.")]


class StreamOptions(BaseModel):
    """How a stream is written."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: Forgotten = None


class SamplingRequest(BaseModel):
    """The options of a completion."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=200)]
    max_tokens: Annotated[int, Field(ge=1, le=_MOST_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=_MOST_TOKENS)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(fail_fast=True, max_length=_LONGEST_STOP),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    user: Forgotten = None
    metadata: Forgotten = None
    store: Forgotten = None
    service_tier: Forgotten = None
    safety_identifier: Forgotten = None
    prompt_cache_key: Forgotten = None

    logprobs: Unserved = None
    logit_bias: Unserved = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self) -> dict[str, Any]:
        """The options of the infer job, but for what it is asked."""
        given = {
            option: value
            for name, option in OPTIONS.items()
            if (value := getattr(self, name)) is not None
        }
        # Kept with the job, so that an answer that has to begin anew comes out the same.
        given.setdefault("seed", secrets.randbits(_SEED_BITS))
        if self.max_tokens is not None:
            given["max_tokens"] = self.max_tokens
        return given


class PromptDetails(BaseModel):
    """Of the prompt's tokens, those that were not computed again."""

    cached_tokens: int


class Usage(BaseModel):
    """How many tokens an answer took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None


FinishReason = Literal["stop", "length"]


def usage_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's usage in OpenAI's shape."""
    usage = dict(result["usage"])
    cached = usage.pop("cached_tokens", 0)
    return {**usage, "prompt_tokens_details": {"cached_tokens": cached}}
