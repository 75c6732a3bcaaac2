"""Adapters of warm models: attached unmerged to their base if the engine supports that.

The base is loaded once for all its adapters; an adapter adds only its own weights, which are mapped
from its file.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import orjson

from ...configs.config import ModelConfig
from ...jobs.context import WarmModel
from ...jobs.models import adapters
from ...jobs.models.folder_files import TEMPLATES
from ...jobs.models.pretrained_tokenizer import read_tokenizer

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# Of a tokenizer's JSON: every call sets them.
_PER_CALL = ("padding", "truncation")


class NotServedUnmerged(Exception):
    """An adapter must be merged; the message says why, in a few words."""


@dataclass(frozen=True)
class Attachment:
    """An adapter on its base."""

    warm: WarmModel
    rank: int | None
    num_parameters: int
    size_bytes: int


def check_base_model(model: Any) -> None:
    """Raise NotServedUnmerged for a base that the engine's decoder does not support."""
    from ...jobs.engine.decoder import Decoder

    if not Decoder.supports(model):
        raise NotServedUnmerged(f"no batched decoder for {type(model).__name__}")


def attach(
    base: WarmModel, config: ModelConfig, folder: Path, template: Mapping[str, Any] | None
) -> Attachment:
    """Return the adapter in `folder` on its base, which stays as it is.

    `template`: the response template that the adapter is given.

    Raises NotServedUnmerged, ValueError for an adapter that is damaged or does not fit, and what
    PEFT raises for damaged files.
    """
    import torch

    from ...jobs.engine.layers import text_model
    from ...jobs.engine.low_rank import Adapter, unserved

    tokenizer = _tokenizer(base, folder)
    wrapped = adapters.attached(base.model, folder)
    layers = text_model(wrapped).layers
    other = unserved(wrapped, layers)
    if other is not None:
        raise NotServedUnmerged(f"changes {other}")
    adapter = Adapter.served(layers)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in adapter.tensors):
        raise ValueError("NaNs detected in its weights, or infinite ones: it is broken")
    warm = replace(
        base,
        name=config.name,
        path=folder,
        tokenizer=tokenizer,
        precision=config.precision,
        adapter=adapter,
        weights_digest=None,
        response_template=template,
    )
    return Attachment(warm, adapters.rank_of(folder), adapter.num_parameters, adapter.num_bytes)


class MergedModels:
    """Merged copies of attached adapters, for the jobs of one process that need a whole model.

    They share the weights that the adapters do not change with the base.
    """

    def __init__(self) -> None:
        self._lock = Lock()  # concurrent jobs request the same one
        self._found: WeakKeyDictionary[Any, WarmModel] = WeakKeyDictionary()  # by Adapter

    def of(self, warm: WarmModel) -> WarmModel:
        """Return the merged model of an attached adapter; any other model as it is."""
        if warm.adapter is None:
            return warm
        with self._lock:
            if warm.adapter not in self._found:
                model = adapters.merged(warm.model, warm.path)
                self._found[warm.adapter] = replace(warm, model=model.eval(), adapter=None)
            return self._found[warm.adapter]


def base_config(config: ModelConfig, folder: Path, taken: Collection[str]) -> ModelConfig:
    """Return the model that an adapter's base is loaded as.

    Its name is that of its folder or id, with a number if that one is `taken`. `config`: of the
    adapter in `folder`.
    """
    path = adapters.base_of(folder)
    wanted = Path(path).name if Path(path).is_absolute() else path.replace("/", "--")
    name, number = wanted, 2
    while name in taken:
        name, number = f"{wanted}-{number}", number + 1
    return ModelConfig(name=name, path=path, dtype=config.dtype, task=config.task)


def _tokenizer(base: WarmModel, folder: Path) -> Any:
    """Return an adapter's tokenizer; it shares the base's vocabulary.

    Raises NotServedUnmerged if it produces other tokens than the base's: the engine uses only one.
    """
    if not (folder / "tokenizer_config.json").is_file():
        return base.tokenizer
    is_same = all(_content(folder / name) == _content(base.path / name) for name in _TOKENIZER)
    if is_same and not (folder / TEMPLATES).exists():
        return base.tokenizer
    own = read_tokenizer(folder)
    if _rules(own) != _rules(base.tokenizer) or own.eos_token_id != base.tokenizer.eos_token_id:
        raise NotServedUnmerged("its tokenizer differs from the base's")
    shared = copy.copy(base.tokenizer)  # a vocabulary takes more memory than most adapters
    shared.chat_template = own.chat_template
    return shared


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _rules(tokenizer: Any) -> Any:
    """The rules by which a tokenizer splits text, for a comparison."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return type(tokenizer).__name__, tokenizer.get_vocab()
    rules = orjson.loads(backend.to_str())
    return {name: value for name, value in rules.items() if name not in _PER_CALL}
