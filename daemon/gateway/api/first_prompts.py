"""The first prompt of a job that is checked: as its model gets it, with its number of tokens."""

from __future__ import annotations

from pydantic import BaseModel

from ....configs.config import ModelConfig
from ....jobs.data.options import Content, RecordsSpec
from ....jobs.errors import WarmdError
from ....jobs.models.chat_templates import rendered_prompt, shown_text
from ....jobs.models.tokenizer_folder import TokenizerFolder
from ....jobs.spec import Spec
from ...client import checking
from ...host import fetch
from ..core.state import AppState


class FirstPrompt(BaseModel):
    """A prompt with its templates, at most 1,000 characters of it.

    `tokens` counts the whole prompt; it is null for a model without a tokenizer.json on this
    machine.
    """

    text: str
    tokens: int | None


def first_prompt(state: AppState, spec: Spec) -> FirstPrompt | None:
    """Return the first prompt of a job, also of one that its check refuses; None if it has none.

    Reads the data set and the model's tokenizer: call it in a thread for data.
    """
    if not isinstance(spec, RecordsSpec):
        return None
    try:
        prompt = spec.first_prompt()
        name = getattr(spec, "model", None)
        if prompt is None or name is None:
            return None
        return _shown(prompt, checking.resolve_model(name, state.config))
    except WarmdError:  # the check reports it
        return None


def _shown(prompt: Content, model: ModelConfig) -> FirstPrompt:
    is_here = fetch.hub_id(model) is None
    files = TokenizerFolder(checking.tokenizer_folder(model)) if is_here else None
    text = rendered_prompt(prompt, files.chat_template() if files else None)
    count = files.counter() if files else None
    return FirstPrompt(text=shown_text(text), tokens=count(text) if count else None)
