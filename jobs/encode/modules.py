"""Settings of a sentence-transformers folder, written by its versions 2 to 6. Imports no torch.

`modules.json` lists the steps from a text to its vector: transformer, pooling, optional
normalization; for a cross-encoder, the transformer alone. Its activation is in the folder's
`config_sentence_transformers.json` or in the model's `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from ..errors import JobFailed
from ..models.folder_files import BadFile, read_bytes, read_json, shown

AUTO, MEAN, CLS, LAST = "auto", "mean", "cls", "last"
POOLINGS = (AUTO, MEAN, CLS, LAST)

IDENTITY, SIGMOID = "identity", "sigmoid"  # activations of cross-encoders

_FILE = "modules.json"
_SETTINGS = "sentence_bert_config.json"
_PROMPTS = "config_sentence_transformers.json"
_MOST_BYTES = 1 << 20
_NAMES = {"cls": CLS, "mean": MEAN, "lasttoken": LAST}
_FLAGS = {  # of a pooling's config.json
    "pooling_mode_cls_token": CLS,
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_lasttoken": LAST,
}

_ACTIVATIONS = {
    **dict.fromkeys(("torch.nn.modules.linear.Identity", "torch.nn.Identity"), IDENTITY),
    **dict.fromkeys(("torch.nn.modules.activation.Sigmoid", "torch.nn.Sigmoid"), SIGMOID),
}


@dataclass(frozen=True)
class Modules:
    """Settings of a folder; None: it has none."""

    pooling: str | None = None
    normalize: bool | None = None
    max_length: int | None = None  # maximum tokens of a text, with special tokens
    ignored: tuple[str, ...] = ()  # settings without effect here, for warnings
    unsupported: str | None = None  # a step or a pooling that warmd does not have


def modules_of(folder: Path) -> Modules:
    """Read a model folder. Raises JobFailed for one that is damaged."""
    try:
        steps = _steps(folder)
        if steps is None:
            return Modules()
        pooling, unsupported, normalize = None, None, False
        for name, path in steps:
            match name:
                case "Transformer":
                    pass
                case "Pooling":
                    modes = _modes(folder / path / "config.json")
                    if len(modes) == 1 and modes[0] in POOLINGS:
                        pooling = modes[0]
                    else:
                        unsupported = f"pooling {' and '.join(modes) or 'of no kind'}"
                case "Normalize":
                    normalize = True
                case _:
                    unsupported = f"step {shown(name)}"
        max_length, ignored = _other_settings(folder)
        return Modules(pooling, normalize, max_length, ignored, unsupported)
    except (BadFile, OSError) as error:
        raise JobFailed(f"model: {error}") from error


def activation_of(folder: Path, config: Any) -> str:
    """Return the function from a cross-encoder's logit to its score, IDENTITY or SIGMOID.

    `config`: of the loaded model. Raises JobFailed for another function.
    """
    try:
        has_modules = (folder / _FILE).is_file()
        settings = _optional(folder / _PROMPTS) if has_modules else {}
    except (BadFile, OSError) as error:
        raise JobFailed(f"model: {error}") from error
    stored = getattr(config, "sentence_transformers", None)  # since version 4
    given = (
        settings.get("activation_fn"),
        stored.get("activation_fn") if isinstance(stored, dict) else stored,
        getattr(config, "sbert_ce_default_activation_function", None),
    )
    name = next((one for one in given if one is not None), "torch.nn.Sigmoid")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise JobFailed(
            f"model: the activation of the cross-encoder must be torch.nn.Identity or "
            f"torch.nn.Sigmoid, got {shown(name)}"
        )
    return _ACTIVATIONS[name]


def _steps(folder: Path) -> list[tuple[str, str]] | None:
    """Return name and folder of each step, in order; None without the file."""
    try:
        content = read_bytes(folder / _FILE, _MOST_BYTES)
    except FileNotFoundError:
        return None
    try:
        found = orjson.loads(content)
        if not isinstance(found, list):
            raise TypeError(shown(found))
        return [_step(one) for one in found]
    except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
        takes = "a list of objects with the texts type and path"
        raise BadFile(_FILE, "", takes, f"another: {error}") from error


def _step(given: Any) -> tuple[str, str]:
    name, path = given["type"].rpartition(".")[2], given["path"]
    if not isinstance(path, str) or {"/", "\0"} & set(path) or path in (".", ".."):
        raise BadFile(_FILE, "path", "the name of a folder in it", shown(path))
    return name, path


def _modes(path: Path) -> list[str]:
    """Return the names of a pooling, usually one."""
    settings = read_json(path)
    if "pooling_mode" in settings:  # since sentence-transformers 5
        mode = settings["pooling_mode"]
        modes = mode if isinstance(mode, list) else [mode]
        if not all(isinstance(one, str) for one in modes):
            raise BadFile(path.name, "pooling_mode", "text or a list of texts", shown(mode))
        return [_NAMES.get(one, shown(one)) for one in modes]
    return [
        _FLAGS.get(name, name)
        for name, is_on in settings.items()
        if name.startswith("pooling_mode_") and is_on
    ]


def _other_settings(folder: Path) -> tuple[int | None, tuple[str, ...]]:
    """Return the maximum length, and the settings that are ignored."""
    settings, ignored = _optional(folder / _SETTINGS), []
    if settings.get("do_lower_case"):
        ignored.append(f"do_lower_case of {_SETTINGS}: texts are not changed")
    prompt = _optional(folder / _PROMPTS).get("default_prompt_name")
    if prompt is not None:
        ignored.append(
            f"default_prompt_name {shown(prompt)} of {_PROMPTS}: no prompt is added to texts"
        )
    inputs = settings.get("modality_config")
    if isinstance(inputs, dict) and "text" not in inputs:
        ignored.append(f"modality_config of {_SETTINGS}: no chat template is applied to texts")
    length = settings.get("max_seq_length")
    if length is not None and (not isinstance(length, int) or length < 3):
        raise BadFile(_SETTINGS, "max_seq_length", "an integer of at least 3", shown(length))
    return length, tuple(ignored)


def _optional(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
