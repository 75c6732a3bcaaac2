"""YAML files of settings, read strictly: a mistake is named with its file and line."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from .values import ConfigError

# YAML 1.1 wants a dot in 1e-5 and reads it as text otherwise; here it is a number, as in YAML 1.2.
_MOST_BYTES = 1_000_000  # of a file
_MOST_VALUES = 1_000_000  # a file without aliases has fewer
_EXPONENT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file; an empty file has none. Raises ConfigError."""
    import yaml  # imported here: it costs 10 ms, needed only with a config file

    # Not the loader in C: 100,000 opening brackets crash it.
    class Loader(yaml.SafeLoader):
        """Reads plain values only, and refuses a key that stands twice."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    if key.value in seen:
                        problem = f"{key.value!r} stands twice"
                        raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

        def get_single_node(self) -> Any:
            node = super().get_single_node()
            # Nested aliases ("billion laughs"): a few lines expand to gigabytes in a message.
            if node is not None and _expanded(node, {}) > _MOST_VALUES:
                problem = f"aliases make more than {_MOST_VALUES:,} values of it"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
            return node

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
    text = _read_text(path)
    try:
        values = yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(place, f"is not right YAML: {error.problem}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{path}:{line}", "is not right YAML: a control character") from error
    except (ValueError, LookupError, AttributeError, RecursionError) as error:
        # Raised by PyYAML's constructors unconverted: `2026-13-45`, `!!bool x`, `[[[[…`.
        problem = str(error).partition("\n")[0]
        raise ConfigError(str(path), f"holds a value that YAML cannot read: {problem}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(str(path), f"must hold `key: value` lines, got {type(values).__name__}")
    return values


def _expanded(node: Any, known: dict[int, float]) -> float:
    """Return the number of nodes with aliases counted as copies; inf for one within itself."""
    if id(node) not in known:
        known[id(node)] = math.inf  # until it is known
        children = node.value if isinstance(node.value, list) else ()
        flat = (n for child in children for n in (child if isinstance(child, tuple) else (child,)))
        known[id(node)] = 1 + sum(_expanded(one, known) for one in flat)
    return known[id(node)]


def _read_text(path: Path) -> str:
    try:
        with open(path, "rb") as file:  # perhaps a pipe: --config <(…)
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(str(path), f"must be a YAML file that I can read: {reason}") from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(str(path), f"must have at most {_MOST_BYTES:,} bytes, got more")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}", "must be UTF-8 text") from error
