"""`/v1/embeddings`: text embeddings by an encode job."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from ....jobs.errors import SpecError
from ..core import answers
from ..core.sampling import Ignored, ModelName
from ..core.state import StateDep, as_param
from ..core.submitter import Submission
from ..core.waiters import CallerDep
from ..http.auth import RESERVATION
from ..http.errors import RESPONSES
from ..http.strict import StrictRoute
from .completions import kind_of_prompt

router = APIRouter(route_class=StrictRoute, tags=["inference"], responses=RESPONSES)

_MAX_TEXTS = 2048
_Text = Annotated[str, Field(min_length=1)]
_Tokens = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True, min_length=1)
]
_Several = Field(fail_fast=True, min_length=1, max_length=_MAX_TEXTS)


class EmbeddingRequest(BaseModel):
    """Texts to embed, or token ids. `pooling` and `normalize` are warmd extensions."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: ModelName
    input: Annotated[
        Annotated[_Text, Tag("str")]
        | Annotated[_Tokens, Tag("list[int]")]
        | Annotated[list[_Text], _Several, Tag("list[str]")]
        | Annotated[list[_Tokens], _Several, Tag("list[list[int]]")],
        Discriminator(kind_of_prompt),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["auto", "mean", "cls", "last"] | None = None
    normalize: bool | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**16)] | None = None
    user: Ignored = None


class Embedding(BaseModel):
    """The embedding of one text: a list of numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Token counts of the texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """The embeddings in the order of the texts; `timings` is a warmd extension."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    timings: dict[str, Any]


@router.post("/v1/embeddings", response_model=EmbeddingList)
async def create_embeddings(
    body: EmbeddingRequest, state: StateDep, caller: CallerDep, request: Request
) -> Response:
    """Embed texts."""
    model = await state.in_thread(state.model_index.known, body.model)
    options: dict[str, Any] = {"model": model, "truncate": False}
    if isinstance(body.input, str):
        options["text"] = [body.input]
    elif isinstance(body.input[0], str):
        options["text"] = body.input
    else:
        is_one = isinstance(body.input[0], int)
        options["tokens"] = orjson.dumps([body.input] if is_one else body.input).decode()
    for name in ("pooling", "normalize", "dimensions"):
        if getattr(body, name) is not None:
            options[name] = getattr(body, name)
    try:
        spec = state.parse("encode", options)
        job_id, headers = await answers.submit(state, caller, Submission(spec))
        del spec, options
        body.input = ""  # the job has it
        request.scope[RESERVATION].shrink(0)
    except SpecError as error:
        raise as_param(error, {"text": "input", "tokens": "input"}) from error
    result = await answers.full(state, request, caller, job_id)
    usage = {"prompt_tokens": result["tokens"], "total_tokens": result["tokens"]}
    state.metrics.count_tokens(usage)
    in_base64 = body.encoding_format == "base64"

    def answer() -> bytes:
        data = _data(result, in_base64)
        head = {"object": "list", "model": body.model, "data": data, "usage": usage}
        return orjson.dumps(
            {**head, "timings": result["timings"]}, option=orjson.OPT_SERIALIZE_NUMPY
        )

    # In a thread: serializing thousands of vectors would block the event loop.
    return Response(await state.in_thread(answer), media_type="application/json", headers=headers)


def _data(result: dict[str, Any], in_base64: bool) -> list[dict[str, Any]]:
    """Return the embeddings of a result: those in it, or those in the file that it names."""
    import numpy as np

    if "embeddings" in result:
        vectors = np.asarray(result["embeddings"], np.float32)
    else:
        with np.load(Path(result["output"]), allow_pickle=False) as arrays:
            vectors = arrays["embeddings"]
    return [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()
            if in_base64
            else vector,
        }
        for index, vector in enumerate(vectors)
    ]
