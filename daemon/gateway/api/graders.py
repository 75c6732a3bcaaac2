"""`/v1/fine_tuning/alpha/graders`: graders by OpenAI's API, tried on one text before a job."""

from __future__ import annotations

import time
from typing import Annotated, Any

import orjson
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from ....jobs.errors import JobFailed, SpecError
from ....jobs.graders import grader as graders
from ..core.state import AppState, StateDep
from ..http.errors import RESPONSES
from ..http.strict import StrictRoute
from . import methods

router = APIRouter(
    route_class=StrictRoute,
    prefix="/v1/fine_tuning/alpha/graders",
    tags=["training"],
    responses=RESPONSES,
)

# Bytes of a grader, an item and a text, and characters of a template that is filled in. Comparing
# two texts of this length takes 20 ms, and ten times as long ones 1.6 s.
_MOST = 10_000
_ERRORS = (
    "formula_parse_error", "invalid_variable_error", "model_grader_parse_error",
    "model_grader_refusal_error", "model_grader_server_error", "other_error",
    "python_grader_runtime_error", "python_grader_server_error", "sample_parse_error",
    "truncated_observation_error", "unresponsive_reward_error",
)  # fmt: skip


class GraderOnly(BaseModel):
    """A grader as a fine-tuning job takes it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    grader: dict[str, Any]


class RunGrader(GraderOnly):
    """A grader, a completion and the record that it belongs to."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    model_sample: Annotated[str, Field(max_length=_MOST)]
    item: dict[str, Any] | None = None


class GraderMetadata(BaseModel):
    """What was graded; no error is ever true here: a request with a mistake is refused."""

    name: str
    type: str
    errors: dict[str, bool]
    execution_time: float  # seconds
    scores: dict[str, float]
    token_usage: None = None
    sampled_model_name: None = None


class Graded(BaseModel):
    """The score of a completion, and those of the parts of a multi grader."""

    model_config = ConfigDict(protected_namespaces=())

    reward: float
    sub_rewards: dict[str, float]
    metadata: GraderMetadata
    model_grader_token_usage_per_model: dict[str, Any] = {}


@router.post("/validate", response_model=GraderOnly)
async def validate_grader(body: GraderOnly, state: StateDep) -> Any:
    """Check a grader as a fine-tuning job would."""
    await state.in_schema_thread(_checked, body, state)
    return {"grader": body.grader}


@router.post("/run", response_model=Graded)
async def run_grader(body: RunGrader, state: StateDep) -> Any:
    """Score a completion. Python graders, and warmd's rewards, run in jobs only."""
    return await state.in_schema_thread(_graded, body, state)


def _checked(body: GraderOnly, state: AppState) -> dict[str, Any]:
    """Return the options of a grader. Raises SpecError."""
    return methods.grader(body.grader, "grader", state.config.http_graders)


def _graded(body: RunGrader, state: AppState) -> dict[str, Any]:
    options = _checked(body, state)
    item = body.item or {}
    for field, value in (("grader", body.grader), ("item", item)):
        if (size := len(orjson.dumps(value))) > _MOST:
            raise SpecError(field, f"must be at most {_MOST} bytes here, got {size}")
    if graders.OPTION not in options:
        raise SpecError("grader.type", "must not be warmd here: its rewards run in jobs only")
    read = graders.read(options[graders.OPTION], most=_MOST)
    if read.functions:
        raise SpecError("grader.type", "must not be python here: its functions run in jobs only")
    for column in read.columns:
        if column not in item:
            raise SpecError("item", f"must have {column}, which the grader names, got none")
    began = time.perf_counter()
    try:
        reward = read.score(body.model_sample, item)
        parts = {name: part.score(body.model_sample, item) for name, part in read.parts.items()}
    except JobFailed as error:
        raise SpecError("grader", str(error)) from error
    name = str(body.grader.get("name") or body.grader["type"])
    return {
        "reward": reward,
        "sub_rewards": parts,
        "metadata": {
            "name": name,
            "type": body.grader["type"],
            "errors": dict.fromkeys(_ERRORS, False),
            "execution_time": time.perf_counter() - began,
            "scores": parts or {name: reward},
        },
    }
