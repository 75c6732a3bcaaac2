"""`/v1/warmd/kinds`: the options of the training kinds, for forms, and their check."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from ....jobs import KINDS, spec_class
from ....jobs.errors import SpecError
from ....jobs.spec import GROUPS, OptionInfo
from ....jobs.training.options import TrainingSpec
from ...lifecycle.view import listed_kinds
from ..core.state import StateDep
from ..http.errors import RESPONSES
from ..http.hidden import without_paths
from ..http.strict import StrictRoute
from . import methods
from .changes import ChangeDep
from .fine_tuning import CreateJob, Problem, by_request, checked
from .first_prompts import FirstPrompt, first_prompt

router = APIRouter(route_class=StrictRoute, prefix="/v1/warmd", tags=["training"])


class OptionView(BaseModel):
    """An option of a job kind. If `default` is null, `default_text` describes the default."""

    name: str
    type: str
    many: bool
    default: Any
    default_text: str | None
    help: str
    group: str
    takes: str
    relations: list[str]  # to other options, in words
    choices: list[str] | None
    minimum: float | None
    maximum: float | None


class KindView(BaseModel):
    """A job kind that can be submitted by `POST /v1/fine_tuning/jobs` with this method."""

    kind: str
    method: str
    help: str
    data: str  # the option that `training_file` stands for
    builtin_data: str | None  # its value that needs no file
    validation: str | None  # the option that `validation_file` stands for
    judged_by: list[str]  # metrics by which a sweep can compare its jobs; [] if none is possible
    options: list[OptionView]
    defaults: dict[str, Any]  # of all options, also of those that a request cannot set


class KindList(BaseModel):
    """The kinds, and the headings of their groups of options in order."""

    groups: dict[str, str]
    every: list[str]  # names of all kinds, also of those that have no method
    runs: list[str]  # those whose jobs are trainings or evaluations, as `/v1/warmd/runs` lists them
    data: list[KindView]


class Checked(BaseModel):
    """The job that would be queued, with all its options, or the problem.

    `first_prompt`: also with a problem of other options than those of the prompt.
    """

    problem: Problem | None = None
    kind: str | None = None
    options: dict[str, Any] | None = None
    steps_total: int | None = None
    first_prompt: FirstPrompt | None = None


@router.get("/kinds", response_model=KindList, responses=RESPONSES)
async def list_kinds(state: StateDep) -> Any:
    """List the job kinds that can be submitted over HTTP, with their options."""
    shown = [_kind(kind) for kind in methods.kinds().values()]
    return {"groups": GROUPS, "every": list(KINDS), "runs": listed_kinds(), "data": shown}


def _kind(kind: str) -> dict[str, Any]:
    spec, http = spec_class(kind), methods.method_of(kind)
    assert http is not None
    return {
        "kind": kind,
        "method": http.type,
        "help": (spec.__doc__ or "").strip(),
        "data": http.training_file,
        "builtin_data": http.builtin_data,
        "validation": http.validation_file,
        "judged_by": list(spec.judged_by) if issubclass(spec, TrainingSpec) else [],
        "options": [_option(info) for info in methods.options_over_http(kind, http).values()],
        "defaults": {
            name: _default(info) for name, info in spec.options().items() if info.former is None
        },
    }


def _default(info: OptionInfo) -> Any:
    return list(info.default) if isinstance(info.default, tuple) else info.default


def _option(info: OptionInfo) -> dict[str, Any]:
    choices = methods.choices_over_http(info)
    return {
        "name": info.name,
        "type": info.type.__name__,
        "many": info.many,
        "default": _default(info),
        "default_text": info.default_text,
        "help": info.help,
        "group": info.group,
        "takes": info.takes,
        "relations": list(info.relations),
        "choices": None if choices is None else list(choices),
        "minimum": info.minimum if info.above is None else info.above,
        "maximum": info.maximum,
    }


@router.post("/check", response_model=Checked, responses=RESPONSES)
async def check_job(body: CreateJob, state: StateDep, _: ChangeDep) -> Any:
    """Check a training job as `POST /v1/fine_tuning/jobs` does, and queue nothing."""
    try:
        spec = (await checked(body, state)).spec
    except SpecError as error:
        return {"problem": Problem.of(error)}
    prompt = await state.in_data_thread(first_prompt, state, spec)
    try:
        document = await state.in_data_thread(state.client.jobs.check, spec)
    except SpecError as error:
        return {"problem": Problem.of(by_request(error, spec.kind)), "first_prompt": prompt}
    # The steps of the checked document: without `samples`, the check has counted the data.
    steps = getattr(spec.parse(document["spec"]), "steps_total", None)
    return {
        "kind": spec.kind,
        "options": without_paths(spec.to_json()),
        "steps_total": steps,
        "first_prompt": prompt,
    }
