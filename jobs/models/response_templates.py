"""Response templates: how a family of models writes messages, as JSON for transformers' parser.

A template names the texts, or regular expressions, around the reasoning, the tool calls and the
content of a completion. Imports transformers and TRL in its functions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..files.chats import REASONING, TOOL_CALLS
from .folder_files import BadFile, naming, read_json, shown

CONTENT = "content"
MOST_BYTES = 64 << 10  # of a file; known templates have 2 KB
_MOST_PATTERN = 4096  # characters of a regular expression; the longest known has 700

_FLAGS = ("repeats", "optional", "transform_each")
_PATTERNS = ("open_pattern", "close_pattern")
_VALUE_PARSER, _TAG_PATTERN = "value_parser", "tag_pattern"
# The arguments of transformers' parsers of content.
_ARGUMENTS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("text", "int", "float", "bool"), frozenset({"strip"})),
    "json": frozenset({"strip", "unquoted_keys", "string_delims", "allow_non_json"}),
    "xml-inline": frozenset({_TAG_PATTERN, _VALUE_PARSER, "merge_duplicates"}),
    "kv-lines": frozenset({"strip", "line_sep", "kv_sep", _VALUE_PARSER}),
    "python-call-list": frozenset(),
}


@dataclass(frozen=True)
class Described:
    """The response template of a model."""

    template: Mapping[str, Any]
    is_of_trl: bool = False  # whether TRL has it for the chat template


def described(tokenizer: Any, given: Mapping[str, Any] | None = None) -> Described | None:
    """Return the response template of a model: the given one, its tokenizer's, or TRL's.

    None if there is none.
    """
    found = given or getattr(tokenizer, "response_template", None)
    if found is not None:
        return Described(found)
    if not isinstance(tokenizer.chat_template, str):
        return None
    of_trl = _from_trl(tokenizer.chat_template)
    return None if of_trl is None else Described(of_trl, is_of_trl=True)


@lru_cache(maxsize=64)
def _from_trl(chat_template: str) -> dict[str, Any] | None:
    from trl.chat_template_utils import add_response_schema

    tokenizer: Any = SimpleNamespace(chat_template=chat_template)  # all of it that TRL reads
    try:
        found: dict[str, Any] = add_response_schema(tokenizer).response_template
    except ValueError:  # a template that it does not know
        return None
    return found


def replaced_by_file(tokenizer: Any) -> str | None:
    """Return whose template a given file takes the place of, in words; None: there is no other."""
    other = described(tokenizer)
    if other is None:
        return None
    return "TRL's for its chat template" if other.is_of_trl else "its tokenizer's own"


def check_is_there(path: Path) -> None:
    """Raise ValueError for a file that is missing or cannot be read."""
    if not os.access(path, os.R_OK):
        raise ValueError(f"response_template: must be a JSON file, got {path}: it cannot be read")


def read(path: Path) -> dict[str, Any]:
    """Return the response template in a file. Raises ValueError with file and field, OSError."""
    check_is_there(path)
    template = read_json(path, MOST_BYTES)
    _check_fields(path.name, template)
    with naming(f"{path.name}: must be a response template that transformers takes"):
        _loaded(template)
    return template


def _loaded(template: Mapping[str, Any]) -> Any:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(dict(template))


def _check_fields(file: str, template: Mapping[str, Any]) -> None:
    """Check what transformers' parser takes without a check, or only in the middle of a text."""
    _check_pattern(file, "start_anchor_pattern", template.get("start_anchor_pattern", ""))
    fields = template.get("fields")
    if not isinstance(fields, dict):
        raise BadFile(file, "fields", "an object", shown(fields))
    for name, field in fields.items():
        place = f"fields.{name[:40]}"
        if name not in (CONTENT, TOOL_CALLS, *REASONING):
            names = ", ".join((CONTENT, TOOL_CALLS, *REASONING))
            raise BadFile(file, "fields", f"parts of a message ({names})", shown(name))
        if not isinstance(field, dict):
            raise BadFile(file, place, "an object", shown(field))
        for key in _PATTERNS:
            _check_pattern(file, f"{place}.{key}", field.get(key, ""))
        for key in _FLAGS:
            if not isinstance(field.get(key, False), bool):
                raise BadFile(file, f"{place}.{key}", "true or false", shown(field[key]))
        if name == TOOL_CALLS:
            _check_call(file, f"{place}.transform", field.get("transform"))
        parser, arguments = field.get("content", "text"), field.get("content_args", {})
        _check_parser(file, place, "content_args", parser, arguments)


def _check_call(file: str, place: str, transform: Any) -> None:
    """Check that what becomes of a call has a function (None: the call is left as it is)."""
    if transform is not None and not (isinstance(transform, dict) and "function" in transform):
        raise BadFile(file, place, "an object with function", shown(transform))


def _check_pattern(file: str, place: str, value: Any) -> None:
    if not isinstance(value, str) or len(value) > _MOST_PATTERN:
        got = f"{len(value):,} characters" if isinstance(value, str) else shown(value)
        takes = f"a regular expression of at most {_MOST_PATTERN:,} characters"
        raise BadFile(file, place, takes, got)


def _check_parser(file: str, place: str, key: str, parser: Any, arguments: Any) -> None:
    """Check a parser of content, and the arguments that it has under `key`."""
    if not isinstance(parser, str) or parser not in _ARGUMENTS:
        raise BadFile(file, f"{place}.content", f"one of {', '.join(_ARGUMENTS)}", shown(parser))
    place = f"{place}.{key}"
    if not isinstance(arguments, dict):
        raise BadFile(file, place, "an object", shown(arguments))
    for name, value in arguments.items():
        if name not in _ARGUMENTS[parser]:
            known = ", ".join(sorted(_ARGUMENTS[parser])) or "none"
            raise BadFile(file, place, f"arguments of {parser} ({known})", shown(name))
        here = f"{place}.{name}"
        if name == _TAG_PATTERN:
            _check_pattern(file, here, value)
            with naming(f"{file}: {here} must be a regular expression with a group key"):
                if "key" not in compiled(value).groupindex:
                    raise ValueError(f"{value[:60]!r} has none")
        elif name == _VALUE_PARSER:
            if not isinstance(value, dict) or not value.keys() <= {"name", "args"}:
                raise BadFile(file, here, "an object with name and args", shown(value))
            _check_parser(file, here, "args", value.get("name", "text"), value.get("args", {}))
        elif name == "string_delims":
            if not isinstance(value, list) or not all(map(_is_pair_of_texts, value)):
                raise BadFile(file, here, "a list of pairs of texts", shown(value))
        elif name in ("line_sep", "kv_sep"):
            if not isinstance(value, str) or not value:
                raise BadFile(file, here, "a text that is not empty", shown(value))
        elif not isinstance(value, bool):
            raise BadFile(file, here, "true or false", shown(value))
    if parser == "xml-inline" and _TAG_PATTERN not in arguments:
        raise BadFile(file, f"{place}.{_TAG_PATTERN}", "a regular expression", "none")


def _is_pair_of_texts(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and all(isinstance(text, str) and text for text in value)


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Any:
    """Return a regular expression compiled as transformers' parser compiles it."""
    # As an anchor: the module of regular expressions is a dependency of transformers.
    return _loaded({"start_anchor_pattern": pattern, "fields": {CONTENT: {}}}).start_anchor_re


def tag_patterns(arguments: Any) -> Iterator[str]:
    """Yield the regular expressions in the arguments of a parser of content."""
    if isinstance(arguments, dict):
        if isinstance(pattern := arguments.get(_TAG_PATTERN), str):
            yield pattern
        parser = arguments.get(_VALUE_PARSER)
        yield from tag_patterns(parser.get("args") if isinstance(parser, dict) else None)


def loaded(template: Mapping[str, Any]) -> Any:
    """Return a template as transformers' parser takes it. Raises ValueError."""
    return _loaded_once(json.dumps(template))


@lru_cache(maxsize=64)
def _loaded_once(text: str) -> Any:
    return _loaded(json.loads(text))
