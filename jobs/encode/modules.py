"""What a model folder of sentence-transformers says of its embeddings. Imports no torch.

`modules.json` lists the steps from a text to its vector: the transformer, the pooling, and perhaps
the normalization. Its format is that of sentence-transformers 5.
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

_FILE = "modules.json"
_MOST_BYTES = 1 << 20
_NAMES = {"cls": CLS, "mean": MEAN, "lasttoken": LAST}
_FLAGS = {  # of a pooling's config.json
    "pooling_mode_cls_token": CLS,
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_lasttoken": LAST,
}


@dataclass(frozen=True)
class Modules:
    """How a folder's embeddings are made; None: it does not say."""

    pooling: str | None = None
    normalize: bool | None = None
    max_length: int | None = None  # tokens of a text, with special ones
    ignored: tuple[str, ...] = ()  # settings that have no effect here
    unsupported: str | None = None  # a step or a pooling that this version does not have


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
        return Modules(pooling, normalize, _max_length(folder), _ignored(folder), unsupported)
    except (BadFile, OSError) as error:
        raise JobFailed(f"model: {error}") from error


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
    if not isinstance(path, str) or "/" in path or path in (".", ".."):
        raise BadFile(_FILE, "path", "the name of a folder in it", shown(path))
    return name, path


def _modes(path: Path) -> list[str]:
    """Return the names of a pooling, usually one."""
    settings = read_json(path)
    if "pooling_mode" in settings:  # since sentence-transformers 5
        mode = settings["pooling_mode"]
        return [_NAMES.get(one, shown(one)) for one in (mode if isinstance(mode, list) else [mode])]
    return [
        _FLAGS.get(name, name)
        for name, is_on in settings.items()
        if name.startswith("pooling_mode_") and is_on
    ]


def _max_length(folder: Path) -> int | None:
    found = _optional(folder / "sentence_bert_config.json").get("max_seq_length")
    if found is not None and (not isinstance(found, int) or found < 3):
        raise BadFile("sentence_bert_config.json", "max_seq_length", "from 3 on", shown(found))
    return found


def _ignored(folder: Path) -> tuple[str, ...]:
    found = []
    if _optional(folder / "sentence_bert_config.json").get("do_lower_case"):
        found.append("do_lower_case of sentence_bert_config.json: texts are not changed")
    prompt = _optional(folder / "config_sentence_transformers.json").get("default_prompt_name")
    if prompt is not None:
        found.append(
            f"default_prompt_name {shown(prompt)} of config_sentence_transformers.json: no prompt "
            "is put before texts"
        )
    return tuple(found)


def _optional(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
