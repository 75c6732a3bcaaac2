"""`/tokenize` and `/detokenize`, as vLLM has them: the tokens of a prompt or chat, and back."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from ....jobs.errors import SpecError
from ....jobs.infer.options import TOKENS
from ..core import answers
from ..core.sampling import ModelName, Unsupported
from ..core.state import AppState, StateDep, as_param
from ..core.submitter import Submission
from ..core.waiters import CallerDep
from ..http.auth import RESERVATION
from ..http.bodies import Reservation
from ..http.errors import RESPONSES, ApiError
from ..http.strict import StrictRoute
from . import images
from .chat import MAX_MESSAGES, MAX_TOOLS, Message, images_of
from .tools import Tool

router = APIRouter(route_class=StrictRoute, tags=["inference"], responses=RESPONSES)


class TokenizeRequest(BaseModel):
    """A prompt, or a chat as `/v1/chat/completions` renders it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: ModelName
    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: (
        Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
        | None
    ) = None
    add_special_tokens: Annotated[
        bool | None, Field(description="Default: true for a prompt, false for a chat.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, Field(description="Of a chat. Default: true.")
    ] = None
    return_token_strs: bool | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: Unsupported = None
    chat_template: Unsupported = None
    mm_processor_kwargs: Unsupported = None


class Tokens(BaseModel):
    """The tokens of a prompt; `max_model_len` is null for a model without a limit."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(BaseModel):
    """Token ids."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: ModelName
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


class Detokenized(BaseModel):
    """The text of token ids, special tokens included."""

    prompt: str


@router.post("/tokenize", response_model=Tokens)
async def tokenize(
    body: TokenizeRequest, state: StateDep, caller: CallerDep, request: Request
) -> Response:
    """Return the tokens of a prompt or a chat."""
    model = await state.in_thread(state.model_index.known, body.model)
    reservation: Reservation = request.scope[RESERVATION]
    if reservation.is_large or images_of(body.messages or ()):
        submission = await state.in_parser_thread(_submission, body, model, state)
    else:
        submission = _submission(body, model, state)
    body.prompt = body.messages = body.tools = body.chat_template_kwargs = None  # it has them
    await reservation.grow(submission.size)
    job_id, headers = await answers.submit(state, caller, submission)
    del submission
    reservation.shrink(0)
    result = await answers.full(state, request, caller, job_id)
    (choice,) = result["choices"]
    answer = {
        "count": len(choice["tokens"]),
        "max_model_len": result["max_model_len"],
        "tokens": choice["tokens"],
        "token_strs": choice["token_strs"] if body.return_token_strs else None,
    }
    # In a thread: serializing many tokens would block the event loop.
    content = await state.in_thread(orjson.dumps, answer)
    return Response(content, media_type="application/json", headers=headers)


@router.post("/detokenize", response_model=Detokenized)
async def detokenize(
    body: DetokenizeRequest, state: StateDep, caller: CallerDep, request: Request
) -> Response:
    """Return the text of token ids."""
    model = await state.in_thread(state.model_index.known, body.model)
    if not body.tokens:
        return JSONResponse({"prompt": ""})
    options = {"model": model, "prompts": orjson.dumps([body.tokens]).decode()}
    try:
        submission = Submission(state.parse("infer", {**options, "reply": TOKENS}))
        job_id, headers = await answers.submit(state, caller, submission)
        del submission, options
        body.tokens.clear()  # the job has them
        request.scope[RESERVATION].shrink(0)
        result = await answers.full(state, request, caller, job_id)
    except SpecError as error:
        raise as_param(error, {"prompts": "tokens"}) from error
    except ApiError as error:
        if error.param != "prompts":
            raise
        message = str(error).replace("prompts: [0]", "tokens:", 1)
        raise ApiError(error.status, message, param="tokens") from None
    return JSONResponse({"prompt": result["choices"][0]["text"]}, headers=headers)


def _submission(body: TokenizeRequest, model: str, state: AppState) -> Submission:
    """Return the job for a prompt or a chat on a model. Raises SpecError."""
    given = [name for name in ("prompt", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        got = " and ".join(given) or "neither"
        raise SpecError("prompt", f"must be given, or else messages, got {got}")
    options: dict[str, Any] = {"model": model, "reply": TOKENS}
    found = {}
    if body.messages is None:
        options["prompt"] = body.prompt
    else:
        files = state.config.http_files
        found = images.collect(images_of(body.messages), "messages", files, state.images)
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        options["messages"] = orjson.dumps(messages).decode()
    if body.tools:
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
        options["tools"] = orjson.dumps(tools).decode()
    if body.chat_template_kwargs:
        options["chat_template_kwargs"] = orjson.dumps(body.chat_template_kwargs).decode()
    for name in ("add_special_tokens", "add_generation_prompt"):
        if (value := getattr(body, name)) is not None:
            options[name] = value
    return Submission(state.parse("infer", options), images=found)
