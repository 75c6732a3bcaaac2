"""Which job kinds support a model, by its config.json or the loaded model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import JobFailed, SpecError

# Class-name suffixes of heads that neither generate text nor fill masks.
_OTHER_HEADS = (
    *("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
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


def _supporting_kinds(name: str) -> str:
    if name.endswith(_MASKED_LM):
        return "mlm and encode take it"
    return "encode takes it" if _is_headless(name) else "no kind of job takes it"


def _class_in(config: Mapping[str, Any]) -> str:
    """The first class that a config.json names, or ""."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _is_headless(name: str) -> bool:
    return name.endswith("Model") and not name.endswith("LMHeadModel")
