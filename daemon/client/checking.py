"""Checks of a job before it is queued: its files, and the model that its spec names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...configs.config import DaemonConfig, ModelConfig
from ...jobs.context import RULES
from ...jobs.data.options import RecordsSpec
from ...jobs.data.trained_prompt import TrainedPrompt
from ...jobs.errors import Conflict, NotFound, SpecError
from ...jobs.ids import is_job_id
from ...jobs.models.adapters import check_files, is_adapter, model_folder
from ...jobs.models.chat_templates import shown_prompt
from ...jobs.models.folder_checks import check_folder
from ...jobs.models.folder_files import TEMPLATES, read_json
from ...jobs.models.model_types import check_type
from ...jobs.models.tokenizer_folder import TokenizerFolder
from ...jobs.spec import Spec, path_of
from ..host import fetch, model_files
from ..host.home import Home
from ..host.warm_set import known_models, on_demand_models
from ..runs.rundir import RunDir
from ..runs.weights import Weights
from .trained import FetchReport, is_explicit, trained_by

_TEMPLATES = ("chat_template.jinja", TEMPLATES)  # next to tokenizer_config.json


def document_of(
    spec: Spec,
    config: DaemonConfig,
    *,
    init: Weights | None,
    model: ModelConfig | None,
    report: FetchReport | None = None,
    on_note: Callable[[str], None] | None = None,
    reads_tokenizer: bool = True,
) -> dict[str, Any]:
    """Check a spec against files and models; return the content of its spec.json.

    `init` and `model` as for `Jobs.submit`. `report`: for a model that must be fetched. `on_note`
    is called with notes on what was chosen, and on checks that are left to the job.
    `reads_tokenizer`: whether prompts are counted, which may take a second. Raises SpecError,
    NotFound or StoreUnavailable.
    """
    spec.check_completions(config.max_completions)
    located = spec.located(Path.cwd())
    if init is not None:
        model = ModelConfig(name=init.name, path=str(init.folder))
    elif model is None:
        name = getattr(located, "model", None)
        model = None if name is None else resolve_model(name, config, report)
    settings = None if model is None else _model_settings(model)
    located = _as_trained(located, settings, on_note)
    document: dict[str, Any] = {
        "spec": located.to_json(),
        "python_path": [str(Path.cwd())],
        "rules": RULES,
    }
    if model is not None:
        document["model"] = model.__dict__
    if init is not None:
        document["init_from"] = init.name
    located.check_inputs(settings)
    if model is not None and settings is not None:
        located.check_chats(tokenizer_folder(model))
        if reads_tokenizer:
            left = located.check_model_files(tokenizer_folder(model))
            if left is not None and on_note is not None:
                on_note(left)
        located.check_layers(fetch.local_folder(model))
    return document


def _as_trained(
    spec: Spec, settings: Mapping[str, Any] | None, on_note: Callable[[str], None] | None
) -> Spec:
    """Return the spec with the prompt that its model was trained with, and tell so."""
    found = spec.as_trained(settings)
    if on_note is None:
        return found
    before, after = (TrainedPrompt.of(one.to_json()) for one in (spec, found))
    if after is not None and after != before:
        on_note(
            f"prompts as in the model's training: {after.description}; --template as-is leaves "
            "them as they are"
        )
    return found


def first_prompt(spec: Spec, document: Mapping[str, Any]) -> str | None:
    """Return the first prompt of a checked job, with its templates; None for kinds without records.

    `document`: what `document_of` returned. Raises SpecError.
    """
    if not isinstance(spec, RecordsSpec):
        return None
    prompt = spec.first_prompt()
    if prompt is None:
        return None
    model, template = ModelConfig(**document["model"]), None
    if not isinstance(prompt, str) and fetch.hub_id(model) is None:
        template = TokenizerFolder(tokenizer_folder(model)).chat_template()
    return shown_prompt(prompt, template)


def tokenizer_folder(model: ModelConfig) -> Path:
    """Return the folder of a model's tokenizer: the adapter's, or else the base model's."""
    folder = fetch.local_folder(model)
    return folder if (folder / "tokenizer_config.json").is_file() else model_folder(folder)


def resolve_model(
    name: str, config: DaemonConfig, report: FetchReport | None = None
) -> ModelConfig:
    """Resolve the name of a model.

    It is that of a warm or configured model, a folder, a hub id, or of a job or a group, as
    `trained_by` has it.

    Raises SpecError, and what `trained_by` raises for a model of a job.
    """
    home = Home(config.home)
    known = {m.name: m for m in config.models} | known_models(home)
    if name in known:
        return known[name]
    if is_explicit(name) and (trained := trained_by(config, name, report)) is not None:
        return trained
    folder = path_of("model", name, Path.cwd())
    if os.path.isdir(folder):  # Path.is_dir raises for names that are too long
        return ModelConfig(name=folder.resolve().name, path=str(folder.resolve()))
    if name.startswith((".", "/", "~")):
        raise SpecError("model", f"must be a model folder, got {name!r}: {_why_no_folder(folder)}")
    if (trained := trained_by(config, name, report)) is not None:
        return trained
    if name.count("/") == 1:
        return ModelConfig(name=name.replace("/", "--"), path=name)
    on_demand = on_demand_models(home)
    if name in on_demand:  # after folders: the user never chose these names
        return on_demand[name]
    known |= on_demand
    raise SpecError(
        "model",
        f"must be a warm model ({', '.join(sorted(known)) or 'none'}), a job that has trained one, "
        f"a model folder or a hub id, got {name!r}: `warmd load NAME=PATH` loads a model",
    )


def _why_no_folder(path: Path) -> str:
    return "a file" if os.path.isfile(path) else "no such folder"


def _model_settings(model: ModelConfig) -> Mapping[str, Any] | None:
    """The model's config.json, with `has_chat_template` of its tokenizer, and `trained_prompt`.

    None if a part of the model may still have to be downloaded.
    """
    if fetch.hub_id(model) is not None:
        return None
    folder = fetch.local_folder(model)
    try:
        state = model_files.fingerprint(folder)
    except OSError:  # the checks say what cannot be read
        return _checked_settings.__wrapped__(folder, model.task, "")
    return _checked_settings(folder, model.task, state)


@lru_cache(maxsize=64)  # a gateway checks the same few models with each request
def _checked_settings(folder: Path, task: str, state: str) -> Mapping[str, Any]:
    """Check a model's folder; `state`, its fingerprint, tells whether it was checked before."""
    if is_adapter(folder):
        _check_adapter(folder)
    path = model_folder(folder)
    try:
        settings = read_json(path / "config.json")
        check_type("model", settings)
        check_folder(path)
    except (OSError, ValueError) as error:
        raise SpecError("model", f"must be a sound model, got {path}: {error}") from error
    if task != "auto":  # loaded by its task, not by the class that it names
        settings.pop("architectures", None)
    found = {
        "has_chat_template": _has_chat_template(folder),
        "trained_prompt": trained_prompt(folder),
    }
    return MappingProxyType(settings | found)


def trained_prompt(folder: Path) -> TrainedPrompt | None:
    """Return how the training of a model's folder wrote prompts; None: as they are, or not known.

    Folders of jobs of earlier versions have no file of it. Raises SpecError for a damaged one.
    """
    if (found := TrainedPrompt.read(folder)) is not None:
        return found
    run = folder.parents[1] if folder.parent.name == "checkpoints" else folder.parent
    if not is_job_id(run.name):
        return None
    with suppress(NotFound, Conflict, OSError):
        return TrainedPrompt.of(RunDir(run).read_spec()["spec"])
    return None


def _check_adapter(folder: Path) -> None:
    """Raise SpecError for an adapter that cannot be served, by its settings and headers."""
    try:
        check_files(folder)
    except Exception as error:  # safetensors raises its own for a damaged header
        reason = str(error).partition("\n")[0]
        raise SpecError("model", f"must be a sound adapter, got {folder}: {reason}") from error


def _has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer of a model or adapter folder has a chat template."""
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        folder = model_folder(folder)
        config = folder / "tokenizer_config.json"
    if any((folder / name).exists() for name in _TEMPLATES):
        return True
    try:
        return bool(read_json(config).get("chat_template"))
    except (OSError, ValueError):
        return False  # no template; a missing tokenizer is reported when the model is loaded
