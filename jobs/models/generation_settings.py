"""The settings in a model's generation_config.json that warmd's own sampling does not apply.

`generate` of transformers applies them. Temperature, top_k, top_p and the number of tokens are
options of a job, with their own defaults; end tokens are applied everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Values with which a setting has no effect, in addition to None and empty ones.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "constraints": (),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "remove_invalid_values": (False,),
    "repetition_penalty": (1.0,),
    "sequence_bias": (),
    "stop_strings": (),
    "suppress_tokens": (),
    "token_healing": (False,),
    "watermarking_config": (),
}
_NEUTRAL_OF_SAMPLING: Mapping[str, tuple[Any, ...]] = {  # only where do_sample is set
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "min_p": (0.0,),
    "top_h": (1.0,),
    "typical_p": (1.0,),
}
# Rollouts of GRPO apply the others, as logits processors. These are no processors, or need
# the end tokens, the length or the forward pass of `generate`.
_NOT_IN_ROLLOUTS = (
    "bad_words_ids",
    "constraints",
    "dola_layers",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "forced_eos_token_id",
    "guidance_scale",
    "min_length",
    "min_new_tokens",
    "num_beams",
    "penalty_alpha",
    "stop_strings",
    "token_healing",
)
_SHOWN = 40  # characters of a value


def unapplied(config: Any) -> dict[str, Any]:
    """Return the settings of a GenerationConfig, or of None, that change completions of `generate`.

    By name; a value that JSON cannot hold is its text.
    """
    neutral = {**_NEUTRAL}
    if getattr(config, "do_sample", None):
        neutral |= _NEUTRAL_OF_SAMPLING
    found = {name: getattr(config, name, None) for name in sorted(neutral)}
    return {
        name: value if isinstance(value, bool | int | float | str | list) else str(value)
        for name, value in found.items()
        if value is not None and value not in ([], (), {}, *neutral[name])
    }


def unapplied_words(settings: Mapping[str, Any]) -> str:
    """Return what it means that `infer` and `eval` do not apply these settings, in a sentence."""
    return f"its generation settings {_listed(settings)} are not applied; transformers applies them"


def of_rollouts_words(settings: Mapping[str, Any]) -> list[str]:
    """Return what these settings mean for the rollouts of GRPO, in up to two sentences."""
    left = set(_NOT_IN_ROLLOUTS)
    others = {name: value for name, value in settings.items() if name in left}
    applied = {name: value for name, value in settings.items() if name not in left}
    found = [unapplied_words(others)] if others else []
    if applied:
        found.append(
            f"its generation settings {_listed(applied)} are applied to rollouts, as in TRL, but "
            "not by infer and eval"
        )
    return found


def clear_unapplied(config: Any) -> None:
    """Reset the settings of a GenerationConfig that rollouts do not apply."""
    for name in _NOT_IN_ROLLOUTS:
        setattr(config, name, None)


def _listed(settings: Mapping[str, Any]) -> str:
    texts = ((name, str(value)) for name, value in settings.items())
    return ", ".join(
        f"{name}={text if len(text) <= _SHOWN else text[: _SHOWN - 1] + '…'}"
        for name, text in texts
    )


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a completion: those of the generation config and of the tokenizer."""
    configured = model.generation_config.eos_token_id
    ends = configured if isinstance(configured, list) else [configured]
    return frozenset(e for e in [*ends, tokenizer.eos_token_id] if e is not None)
