"""Which job kinds support a model, by its config.json or the loaded model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import JobFailed, SpecError

_CLASSIFIER = "ForSequenceClassification"  # the suffix of classes; with one label, cross-encoders
# Class-name suffixes of heads that neither generate text nor fill masks.
_OTHER_HEADS = (
    *(_CLASSIFIER, "ForTokenClassification", "ForQuestionAnswering"),
    *("ForMultipleChoice", "ForNextSentencePrediction"),
)
_MASKED_LM = ("ForMaskedLM", "CodeGraphEncoder")


def positions_in(config: Any) -> int | None:
    """Return the context length of a decoder in tokens, by its loaded config or its config.json.

    None if it names none.
    """
    name = "max_position_embeddings"
    if isinstance(config, Mapping):
        limit: int | None = (config.get("text_config") or config).get(name)
    else:
        limit = getattr(config.get_text_config(), name, None)
    return limit


def check_generates(config: Mapping[str, Any]) -> None:
    """Check by a config.json that a model generates text. Raises SpecError."""
    name = _class_in(config)
    is_other = _is_headless(name) or name.endswith((*_OTHER_HEADS, *_MASKED_LM))
    if is_other or config.get("is_encoder_decoder"):
        raise SpecError("model", _must_generate(str(config.get("model_type")), name))


def check_fills_masks(config: Mapping[str, Any]) -> None:
    """Check by a config.json that a model has a head for masked tokens. Raises SpecError."""
    name = _class_in(config)
    if _is_headless(name) or name.endswith(_OTHER_HEADS):
        raise SpecError("model", must_fill_masks(str(config.get("model_type")), name))


def check_can_generate(model: Any) -> None:
    """Check that a model (of transformers) generates text. Raises JobFailed."""
    if not model.can_generate() or model.config.is_encoder_decoder:
        problem = _must_generate(model.config.model_type, type(model).__name__)
        raise JobFailed(f"model: {problem}")


def check_embeds(config: Mapping[str, Any]) -> None:
    """Check by a config.json that a model is not one that scores pairs. Raises SpecError."""
    name = _class_in(config)
    if name.endswith(_CLASSIFIER):
        raise SpecError("model", _must_embed(str(config.get("model_type")), name))


def check_scores(config: Mapping[str, Any]) -> None:
    """Check by a config.json that a model is a cross-encoder. Raises SpecError."""
    name, labels = _class_in(config), config.get("id2label")
    if not name:  # the loaded model decides
        return
    if not name.endswith(_CLASSIFIER):
        raise SpecError("model", _must_score(str(config.get("model_type")), name))
    num_labels = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)
    if num_labels != 1:
        raise SpecError("model", _must_have_one_label(str(config.get("model_type")), num_labels))


def check_can_embed(model: Any) -> None:
    """Check that a model (of transformers) is not one that scores pairs. Raises JobFailed."""
    name = type(model).__name__
    if name.endswith(_CLASSIFIER):
        raise JobFailed(f"model: {_must_embed(model.config.model_type, name)}")


def check_can_score(model: Any) -> None:
    """Check that a model (of transformers) is a cross-encoder. Raises JobFailed."""
    name, model_type = type(model).__name__, model.config.model_type
    if not name.endswith(_CLASSIFIER):
        raise JobFailed(f"model: {_must_score(model_type, name)}")
    if model.config.num_labels != 1:
        raise JobFailed(f"model: {_must_have_one_label(model_type, model.config.num_labels)}")


def must_fill_masks(model_type: str, name: str) -> str:
    """Return the problem of a model without a head for masked tokens; `name` is its class."""
    return (
        f"must have a head for masked tokens (…ForMaskedLM), got {model_type} ({name}); "
        f"{_supporting_kinds(name)}"
    )


def _must_generate(model_type: str, name: str) -> str:
    return (
        f"must be a decoder that generates text (…ForCausalLM), got {model_type} ({name}); "
        f"{_supporting_kinds(name)}"
    )


def _must_embed(model_type: str, name: str) -> str:
    return (
        f"must be no cross-encoder for embeddings, got {model_type} ({name}): it scores texts "
        "against a query (encode --query, /v1/rerank); task=embedding loads it without its head"
    )


def _must_score(model_type: str, name: str) -> str:
    return (
        f"must be a cross-encoder (…{_CLASSIFIER} with one label) to score texts against a query, "
        f"got {model_type} ({name})"
    )


def _must_have_one_label(model_type: str, num_labels: Any) -> str:
    return f"must have one label to score texts against a query, got {model_type} of {num_labels}"


def _supporting_kinds(name: str) -> str:
    if name.endswith(_CLASSIFIER):
        return "encode --query takes it, with one label"
    if name.endswith(_MASKED_LM):
        return "mlm and encode take it"
    return "encode takes it" if _is_headless(name) else "no kind of job takes it"


def _class_in(config: Mapping[str, Any]) -> str:
    """The first class that a config.json names, or ""."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _is_headless(name: str) -> bool:
    return name.endswith("Model") and not name.endswith("LMHeadModel")
