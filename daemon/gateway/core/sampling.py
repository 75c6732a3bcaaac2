"""Fields that chat and text completions share, of requests and of responses.

A field of OpenAI's API that would change the completion and is not supported is refused, unless its
value has no effect (null, false, an empty list). Fields that do not concern the completion
(`user`, `metadata`, …) are accepted and ignored.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ....jobs.engine import regexes
from ....jobs.errors import SpecError
from ....jobs.infer.options import MOST_BIASES

_MAX_STOP = 16  # texts
_MOST_CHOICES = 1000
_MAX_TOKENS = 2**31
_SEED_BITS = 62

# Name in a request -> option of the infer job.
OPTIONS = {
    "model": "model",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "min_p": "min_p",
    "return_token_ids": "token_ids",
    "stop": "stop",
    "seed": "seed",
    "n": "n",
}


def only(*defaults: object, unsupported: str = "not supported") -> BeforeValidator:
    """Refuse every value except those without effect: clients send defaults explicitly."""

    def check(value: object) -> None:
        if value is not None and not any(
            type(value) is type(default) and value == default for default in defaults
        ):
            raise ValueError(unsupported)

    return BeforeValidator(check)


_NOT_SUPPORTED = Field(description="Not supported: leave it out.")
Unsupported = Annotated[None, only(False, 0, "", [], {}), _NOT_SUPPORTED]
OneOnly = Annotated[None, only(1), Field(description="Not supported: 1 only.")]
ServiceTier = Annotated[
    None, only("auto", "default"), Field(description='Not supported: "auto" or "default" only.')
]
TextOnly = Annotated[None, only([], ["text"]), Field(description='Not supported: ["text"] only.')]
Ignored = Annotated[Any, Field(description="Accepted, no effect.")]
ModelName = Annotated[str, Field(min_length=1, max_length=200)]
Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(gt=0, le=1)]


class StreamOptions(BaseModel):
    """What a stream contains."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: Ignored = None


# Options of the infer job that constrain completions -> fields of requests.
FORMS = {"json_schema": "response_format", "regex": "structured_outputs"}


class StructuredOutputs(BaseModel):
    """The form of completions, as in vLLM: an expression that they match, or one of some texts.

    JSON Schemas are given in `response_format`.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(fail_fast=True, min_length=1, max_length=_MOST_CHOICES),
        ]
        | None
    ) = None

    @property
    def expression(self) -> str:
        """The expression that completions must match. Raises SpecError unless one is given."""
        if self.regex is not None and self.choice is None:
            return self.regex
        if self.choice is None or self.regex is not None:
            got = "neither" if self.regex is None else "both"
            raise SpecError("regex", f"must be a regex or a choice, got {got}")
        return regexes.of_choices(self.choice)


class SamplingRequest(BaseModel):
    """Sampling options, and fields about the request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: ModelName
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKENS)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=0, le=_MAX_TOKENS)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_BIASES)
        ]
        | None
    ) = None
    return_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(fail_fast=True, max_length=_MAX_STOP),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    safety_identifier: Ignored = None
    store: Ignored = None
    user: Ignored = None

    service_tier: ServiceTier = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self) -> dict[str, Any]:
        """Return the options of the infer job, without the prompt or messages."""
        given = {
            option: value
            for name, option in OPTIONS.items()
            if (value := getattr(self, name)) is not None
        }
        # Stored with the job, so that a restarted job generates the same text.
        given.setdefault("seed", secrets.randbits(_SEED_BITS))
        if self.max_tokens is not None:
            given["max_tokens"] = self.max_tokens
        if self.structured_outputs is not None:
            given["regex"] = self.structured_outputs.expression
        if self.logit_bias:
            given["logit_bias"] = orjson.dumps(self.logit_bias).decode()
        return given


class PromptDetails(BaseModel):
    """Prompt tokens by origin: `cached_tokens` came from the prefix cache."""

    cached_tokens: int


class CompletionDetails(BaseModel):
    """Completion tokens by what they are part of."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None  # of messages


class PromptFormat(BaseModel):
    """What prompts were put into, as in the training of their model or as requested."""

    template: str | None = None
    chat_template: bool | None = None
    system: str | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


def usage_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's usage in OpenAI's shape."""
    usage = dict(result["usage"])
    cached, reasoning = usage.pop("cached_tokens", 0), usage.pop("reasoning_tokens", None)
    usage["prompt_tokens_details"] = {"cached_tokens": cached}
    if reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return usage
