"""The content of a data set, and how each training kind would use it. Needs no daemon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...configs.config import DaemonConfig
from ...jobs import KINDS, spec_class
from ...jobs.data import sources, survey
from ...jobs.data.columns import Columns
from ...jobs.data.lengths import num_shared
from ...jobs.data.options import Content, RecordsSpec
from ...jobs.errors import JobFailed, SpecError
from ...jobs.models import chat_templates
from ...jobs.models.tokenizer_folder import TokenizerFolder
from ..host import fetch
from ..host.home import Home
from .checking import resolve_model, tokenizer_folder


def survey_of(
    config: DaemonConfig, dataset: str, columns: Sequence[str], model: str | None
) -> dict[str, Any]:
    """Return rows, columns, lengths and examples of a data set, and its use by each kind.

    Lengths are in tokens of `model`, or in characters. Raises SpecError.
    """
    names = Columns.parse(columns)
    source = sources.located("dataset", dataset, Path.cwd())
    specs = {
        kind: spec_class(kind)(columns=tuple(columns))  # type: ignore[call-arg]
        for kind in KINDS
        if issubclass(spec_class(kind), RecordsSpec)
    }
    count: Callable[[Content], int] = _characters
    unit, positions, divergence = "characters", None, None
    if model is not None:
        folder = _tokenizer_folder(model, config)
        count, unit, positions = _token_counter(folder, model), "tokens", folder.positions()
        divergence = _divergence(folder)
    return survey.survey(
        source,
        names,
        specs,  # type: ignore[arg-type]
        count=count,
        unit=unit,
        positions=positions,
        divergence=divergence,
    )


def _tokenizer_folder(name: str, config: DaemonConfig) -> TokenizerFolder:
    model = resolve_model(name, config)
    if fetch.hub_id(model) is not None:
        raise SpecError("model", f"must be on this machine, got {name!r}: load it first")
    return TokenizerFolder(tokenizer_folder(model))


def _characters(content: Content) -> int:
    return len(_plain(content))


def _plain(content: Content) -> str:
    return content if isinstance(content, str) else chat_templates.plain_text(content)


def _token_counter(folder: TokenizerFolder, model: str) -> Callable[[Content], int]:
    encode = folder.encoder()
    if encode is None:
        raise SpecError("model", "must have a tokenizer.json, got a model without one")
    template, vocabulary = folder.chat_template(), folder.vocabulary(model)

    def count_tokens(content: Content) -> int:
        if isinstance(content, str) or template is None:
            text = _plain(content)
        else:
            text = chat_templates.render(template, content)
        ids = encode(text)
        if vocabulary is not None and (problem := vocabulary.problem(ids)) is not None:
            raise JobFailed(problem)
        return len(ids)

    return count_tokens


def _divergence(folder: TokenizerFolder) -> survey.Divergence:
    encode, decode, template = folder.encoder(), folder.decoder(), folder.chat_template()
    assert encode is not None  # it counts tokens
    assert decode is not None

    def text_of(content: Content, *, is_prompt: bool) -> str:
        if isinstance(content, str) or template is None:
            return _plain(content)
        return chat_templates.render(template, content, add_generation_prompt=is_prompt)

    def divergence(prompt: Content, wholes: Sequence[Content]) -> str | None:
        ids = encode(text_of(prompt, is_prompt=True))
        begin = min(num_shared(ids, encode(text_of(whole, is_prompt=False))) for whole in wholes)
        return None if begin == len(ids) else decode(ids[begin:])

    return divergence


def clear_tokens(config: DaemonConfig) -> int:
    """Remove the tokenized data sets of a home; return the bytes freed."""
    from ...jobs.data.corpus import FOLDER, remove_oldest

    return remove_oldest(Home(config.home).cache / FOLDER, 0)
