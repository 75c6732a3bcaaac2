"""`/v1/warmd/models`: what a model takes; load and unload one by name."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from ....configs.config import ModelConfig
from ....jobs.errors import JobFailed
from ....jobs.models.tokenizer_folder import TokenizerFolder
from ...client import control
from ...client.checking import resolve_model, tokenizer_folder, trained_prompt
from ...host import fetch
from ...host.warm_set import known_models, on_demand_models
from ..core.sampling import PromptFormat
from ..core.state import AppState, StateDep
from ..http.errors import RESPONSES, ApiError
from ..http.strict import StrictRoute
from . import named
from .changes import ChangeDep

router = APIRouter(
    route_class=StrictRoute, prefix="/v1/warmd/models", tags=["models"], responses=RESPONSES
)


class ModelName(BaseModel):
    """A model of `/v1/models`: a configured one, or the job that trained it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=200)]


class ModelInputs(BaseModel):
    """What a model takes. `context_length` is in tokens; null: its config does not say.

    `prompt_format`: what plain prompts are put into, as in the training of the model.
    """

    name: str
    has_chat_template: bool
    context_length: int | None
    prompt_format: PromptFormat | None


class LoadedModel(BaseModel):
    """A loaded model."""

    model_config = ConfigDict(extra="allow")

    name: str


class UnloadedModel(BaseModel):
    """A model that has been unloaded; a base stays until the adapters `kept_for` are unloaded."""

    unloaded: str
    kept_for: list[str]


@router.get("/{name}", response_model=ModelInputs)
async def show_model(name: str, state: StateDep) -> Any:
    """Show whether a model takes chats, how many tokens, and what its prompts are put into."""
    found = await state.in_thread(state.model_index.known, named.text_of(name))
    return await state.in_thread(_inputs_of, state, found)


def _inputs_of(state: AppState, name: str) -> ModelInputs:
    """Raises StoreUnavailable for a model in the run store."""
    model = resolve_model(name, state.config)
    files = TokenizerFolder(tokenizer_folder(model))
    prompt = None if fetch.hub_id(model) is not None else trained_prompt(fetch.local_folder(model))
    return ModelInputs(
        name=name,
        has_chat_template=files.chat_template() is not None,
        context_length=files.positions(),
        prompt_format=None if prompt is None else PromptFormat(**asdict(prompt)),
    )


@router.post("/load", response_model=LoadedModel)
async def load_model(body: ModelName, state: StateDep, _: ChangeDep) -> Any:
    """Load a model and keep it in memory.

    A model that cannot be loaded is refused: its files do not fit, or there is no memory for it.
    """
    name = await state.in_thread(state.model_index.known, body.name)
    model = await state.in_thread(_config_of, state, name)
    try:
        return await state.in_model_thread(control.load_model, state.config, model)
    except JobFailed as error:
        raise ApiError(400, str(error), param="name") from error


@router.post("/unload", response_model=UnloadedModel)
async def unload_model(body: ModelName, state: StateDep, _: ChangeDep) -> Any:
    """Unload a model; jobs that run with it keep it until they end."""
    return await state.in_model_thread(control.unload_model, state.config, body.name)


def _config_of(state: AppState, name: str) -> ModelConfig:
    """The path and the settings of a model whose name is known here."""
    home = state.client.home
    configured = {model.name: model for model in state.config.models}
    known = on_demand_models(home) | configured | known_models(home)
    return known.get(name) or resolve_model(name, state.config)
