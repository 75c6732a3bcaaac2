"""`/v1/rerank` and `/v2/rerank`: documents in the order of their relevance, by an encode job."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from ....jobs.errors import SpecError
from ..core import answers
from ..core.sampling import ModelName, Unsupported, only
from ..core.state import StateDep, as_param
from ..core.submitter import Submission
from ..core.waiters import CallerDep
from ..http.auth import RESERVATION
from ..http.errors import RESPONSES, ApiError
from ..http.strict import StrictRoute
from .embeddings import EmbeddingUsage

router = APIRouter(route_class=StrictRoute, tags=["inference"], responses=RESPONSES)

_MAX_DOCUMENTS = 2048
_MAX_NUMBER = 2**31
_NAMES = {
    "text": "documents",
    "input": "documents",
    "passage_length": "max_tokens_per_doc",
    "truncate": "truncation",
}


class RerankDocument(BaseModel):
    """A document."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str


def _kind_of_document(value: object) -> str:
    """Name the member of the union that a document is, so that errors are about this only."""
    return "str" if isinstance(value, str) else "function-object"


class RerankRequest(BaseModel):
    """A query and the documents to order; fields of Cohere's and Jina's API.

    `truncation` cuts documents, and the query if it is the longer one, to what the model takes;
    without it they are refused. `max_tokens_per_doc` cuts each document in any case.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: ModelName
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[
        list[
            Annotated[
                Annotated[str, Tag("str")] | Annotated[RerankDocument, Tag("function-object")],
                Discriminator(_kind_of_document),
            ]
        ],
        Field(fail_fast=True, min_length=1, max_length=_MAX_DOCUMENTS),
    ]
    top_n: Annotated[int, Field(ge=1, le=_MAX_NUMBER)] | None = None
    return_documents: bool | None = None
    truncation: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=2**20)] | None = None

    max_chunks_per_doc: Unsupported = None
    priority: Unsupported = None
    rank_fields: Annotated[
        None, only([], ["text"]), Field(description='Not supported: ["text"] only.')
    ] = None
    relevant_spans: Annotated[
        None, only({"mode": "disabled"}), Field(description="Not supported: disabled only.")
    ] = None


class RerankResult(BaseModel):
    """The score of one document; `index`: its place in the request."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankTokens(BaseModel):
    """Token counts, the query counted with each document."""

    input_tokens: int
    output_tokens: int


class RerankMeta(BaseModel):
    """Token counts in Cohere's shape, and what was cut."""

    tokens: RerankTokens
    warnings: list[str] | None = None


class Rerank(BaseModel):
    """The documents, the highest score first; `timings` is a warmd extension."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage
    meta: RerankMeta
    timings: dict[str, Any]


@router.post("/v1/rerank", response_model=Rerank)
@router.post("/v2/rerank", response_model=Rerank)
async def create_rerank(
    body: RerankRequest, state: StateDep, caller: CallerDep, request: Request
) -> Response:
    """Order documents by their relevance to a query."""
    model = await state.in_thread(state.model_index.known, body.model)
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    options: dict[str, Any] = {
        "model": model,
        "query": body.query,
        "text": texts,
        "truncate": bool(body.truncation),
    }
    if body.max_tokens_per_doc is not None:
        options["passage_length"] = body.max_tokens_per_doc
    try:
        spec = state.parse("encode", options)
        job_id, headers = await answers.submit(state, caller, Submission(spec))
    except SpecError as error:
        raise as_param(error, _NAMES) from error
    del spec, options
    body.documents = []  # the job has them
    if not body.return_documents:
        texts = []
        request.scope[RESERVATION].shrink(0)
    try:
        result = await answers.full(state, request, caller, job_id)
    except ApiError as error:
        if error.param not in _NAMES:
            raise
        raise _renamed(error, error.param) from error
    usage = {"prompt_tokens": result["tokens"], "total_tokens": result["tokens"]}
    state.metrics.count_tokens(usage)
    meta: dict[str, Any] = {"tokens": {"input_tokens": result["tokens"], "output_tokens": 0}}
    if result["cut"]:
        meta["warnings"] = [
            f"{result['cut']} of {len(result['scores'])} documents were cut to fewer tokens"
        ]
    found = {
        "id": job_id,
        "model": body.model,
        "results": _results(result["scores"], body.top_n, texts),
        "usage": usage,
        "meta": meta,
        "timings": result["timings"],
    }
    return Response(orjson.dumps(found), media_type="application/json", headers=headers)


def _results(scores: list[float], top_n: int | None, texts: list[str]) -> list[dict[str, Any]]:
    """Return the best results; `texts`: of all documents, or none to leave them out."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    found: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]} for index in order[:top_n]
    ]
    for one in found if texts else ():
        one["document"] = {"text": texts[one["index"]]}
    return found


def _renamed(error: ApiError, option: str) -> ApiError:
    """Return an error about an option of the job that names the field of the request."""
    name = _NAMES[option]
    message = name + str(error).removeprefix(option)
    return ApiError(error.status, message, param=name, code=error.code, headers=error.headers)
