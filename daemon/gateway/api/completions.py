"""`/v1/completions`: text completion by an infer job."""

from __future__ import annotations

import time
from collections import Counter
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Discriminator, Field, Tag

from ....jobs.data.options import MOST_CHARACTERS
from ....jobs.engine.options import MOST_TOKENS
from ....jobs.errors import SpecError
from ....jobs.infer.options import MOST_PROMPTS
from ..core import answers, sse
from ..core.answers import Text
from ..core.sampling import (
    FORMS,
    FinishReason,
    OneOnly,
    PromptFormat,
    SamplingRequest,
    Unsupported,
    Usage,
    usage_of,
)
from ..core.state import StateDep, as_param
from ..core.submitter import Submission
from ..core.waiters import CallerDep
from ..http.auth import RESERVATION
from ..http.errors import RESPONSES
from ..http.strict import StrictRoute
from .chat import STREAMED

router = APIRouter(route_class=StrictRoute, tags=["inference"], responses=RESPONSES)


_MOST_LOGPROBS = 5  # as OpenAI's
_Prompt = Annotated[str, Field(min_length=1)]
_Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_ListOfPrompts = Annotated[list[_Prompt], Field(min_length=1, max_length=MOST_PROMPTS)]
_ListOfTokens = Annotated[list[_Tokens], Field(min_length=1, max_length=MOST_PROMPTS)]


def kind_of_prompt(value: object) -> str:
    """Name the member of the union that a prompt is, so that errors are about this only."""
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(value, str):
        return "str"
    if isinstance(first, list):
        return "list[list[int]]"
    return "list[int]" if isinstance(first, int) else "list[str]"


class CompletionRequest(SamplingRequest):
    """Prompts to complete: a text or token ids, or a list of these."""

    prompt: Annotated[
        Annotated[_Prompt, Tag("str")]
        | Annotated[_Tokens, Tag("list[int]")]
        | Annotated[_ListOfPrompts, Tag("list[str]")]
        | Annotated[_ListOfTokens, Tag("list[list[int]]")],
        Discriminator(kind_of_prompt),
    ]
    max_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = None
    echo: bool | None = None
    template: Annotated[
        str | None,
        Field(max_length=MOST_CHARACTERS, description="A prompt template, by text or name."),
    ] = None
    best_of: OneOnly = None
    suffix: Unsupported = None

    def job_options(self) -> dict[str, Any]:
        """Return the options of the infer job."""
        options = self.options()
        if isinstance(self.prompt, str):
            options["prompt"] = self.prompt
        else:
            is_one = isinstance(self.prompt[0], int)
            options["prompts"] = orjson.dumps([self.prompt] if is_one else self.prompt).decode()
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
        if self.echo:
            options["echo"] = True
        if self.template is not None:
            options["template"] = self.template
        return options


class CompletionLogprobs(BaseModel):
    """The log-probabilities of a completion's tokens; null for the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One completion; token ids, which vLLM names so, are present when requested."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: CompletionLogprobs | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    """The response to a prompt; `timings` and `prompt_format` are extensions of warmd."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str | None
    timings: dict[str, Any]
    prompt_format: PromptFormat | None = None


@router.post("/v1/completions", response_model=Completion, responses=STREAMED)
async def create_completion(
    body: CompletionRequest, state: StateDep, caller: CallerDep, request: Request
) -> Response:
    """Complete a prompt, whole or streamed."""
    model = await state.in_thread(state.model_index.known, body.model)
    try:
        spec = state.parse("infer", {**body.job_options(), "model": model})
        job_id, headers = await answers.submit(state, caller, Submission(spec))
        del spec
        body.prompt = ""  # the job has it
        request.scope[RESERVATION].shrink(0)
    except SpecError as error:
        raise as_param(error, {"prompts": "prompt"} | FORMS) from error
    head = {
        "id": f"cmpl-{job_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
    }
    if body.stream:
        offsets: Counter[int] = Counter()  # characters of each choice that were sent
        return sse.response(
            state,
            caller,
            job_id,
            headers,
            sse.Chunks(
                head,
                opened=(),
                on_text=lambda piece: [{"choices": [_choice_of(piece, offsets)]}],
                on_end=lambda choice: _choice(choice["index"], "", choice["finish_reason"]),
                wants_usage=body.wants_usage,
            ),
        )
    result = await answers.full(state, request, caller, job_id)
    state.metrics.count_tokens(result["usage"])
    n = body.n or 1
    answer = {
        **head,
        "choices": [
            {
                **_choice(c["index"], c["text"], c["finish_reason"], logprobs=c.get("logprobs")),
                **_ids(c.get("token_ids"), result.get("prompt_token_ids"), c["index"] // n),
            }
            for c in result["choices"]
        ],
        "usage": usage_of(result),
        "system_fingerprint": answers.fingerprint_of(result.get("weights")),
        "timings": result["timings"],
        **answers.prompt_format_of(result),
    }
    return JSONResponse(answer, headers=headers)


def _choice_of(piece: Text, offsets: Counter[int]) -> dict[str, Any]:
    """Return the choice of a frame."""
    choice = _choice(piece.index, piece.text, logprobs=piece.logprobs, offsets=offsets)
    ids, prompt_ids = piece.token_ids, piece.prompt_ids
    return {**choice, **_ids(ids, None if prompt_ids is None else [prompt_ids])}


def _ids(ids: list[int] | None, prompts: list[list[int]] | None, number: int = 0) -> dict[str, Any]:
    """Return token ids and those of prompt `number`, where they were requested."""
    found = {} if ids is None else {"token_ids": ids}
    return found if not prompts else {**found, "prompt_token_ids": prompts[number]}


def _choice(
    index: int,
    text: str,
    reason: str | None = None,
    *,
    logprobs: list[dict[str, Any]] | None = None,
    offsets: Counter[int] | None = None,
) -> dict[str, Any]:
    """`offsets`: where the text of each choice begins; moved on."""
    offsets = Counter() if offsets is None else offsets
    return {
        "index": index,
        "text": text,
        "finish_reason": reason,
        "logprobs": None if logprobs is None else _logprobs(logprobs, index, offsets),
    }


def _logprobs(found: list[dict[str, Any]], index: int, offsets: Counter[int]) -> dict[str, Any]:
    """Return log-probabilities in the shape of OpenAI's completions."""
    starts = []
    for one in found:
        starts.append(offsets[index])
        offsets[index] += len(one["token"])
    return {
        "tokens": [one["token"] for one in found],
        "token_logprobs": [one["logprob"] for one in found],
        "top_logprobs": [_top(one) for one in found],
        "text_offset": starts,
    }


def _top(one: dict[str, Any]) -> dict[str, float] | None:
    """The token itself and the most likely ones, by their texts or names (`TokenTexts.entry`)."""
    if one["top"] is None:
        return None
    others = {other.get("name", other["token"]): other["logprob"] for other in one["top"]}
    return {one["token"]: one["logprob"], **others}
