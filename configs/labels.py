"""Labels of a machine, and the labels that a job needs: `KEY=VALUE` pairs, comma-separated.

A need with an amount (`memory=40G`, `gpus=2`) is met by a label of at least that amount, any other
need (`gpu=h200`) by a label with the same text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .values import ConfigError, wrong

Labels = Mapping[str, str]

CORES = "cores"  # the label with the number of processor cores
SCHEMA = "schema"  # the label with the format of run directories; set by warmd alone
# Set by warmd alone: no label that users write has a space.
MODEL = "model path"  # the need for a model folder
NODES = "nodes at once"  # the need for so many nodes, of a job that runs on several
GANG_ADDRESS = "gang address"  # the label of a node that runs parts of such jobs
GANG_SOFTWARE = "gang software"  # the label with its software, which all nodes of a gang share
OWN_NEEDS = (SCHEMA, MODEL, NODES)

_KEY = re.compile(r"[a-z][a-z0-9_.-]{0,31}", re.ASCII)
_VALUE = re.compile(r"[A-Za-z0-9][\w.:/-]{0,63}", re.ASCII)
_AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,6})?)(?:([kmgt])(i?)b?)?", re.ASCII | re.IGNORECASE)
_MOST = 32  # pairs
_TAKES = "KEY=VALUE,… such as gpu=h200,memory=40G"


def read_labels(field: str, value: object) -> dict[str, str]:
    """Read labels or needs from a line or a mapping, sorted by key. Raises ConfigError."""
    if value is None or value in ("none", ""):
        return {}
    pairs = value.items() if isinstance(value, Mapping) else _split(field, value)
    found: dict[str, str] = {}
    for key, raw in pairs:
        text = str(raw) if isinstance(raw, str | int | float) else ""
        is_right = isinstance(key, str) and _KEY.fullmatch(key) and _VALUE.fullmatch(text)
        if not is_right or len(found) == _MOST:
            raise wrong(field, _TAKES, value)
        if key == SCHEMA:
            raise ConfigError(field, f"must be without {SCHEMA}, which warmd sets")
        if key in found:
            raise ConfigError(field, f"must name {key} once, got {value!r}")
        found[key] = text
    return dict(sorted(found.items()))


def line_of(labels: Labels) -> str:
    """Return labels or needs as one line, sorted by key: `gpu=h200,memory=40G`."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def parse_line(line: str) -> dict[str, str]:
    """Return the pairs of a line that `line_of` wrote."""
    pairs = (part.partition("=") for part in line.split(",") if part)
    return {key: value for key, _, value in pairs}


def with_ranks(needs: Labels | None, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the needs of a job with the options `processes` and `nodes`, if its kind has them.

    It needs a core for each process on a node, unless more are needed, and that many nodes.
    """
    found = dict(needs or {})
    processes, nodes = options.get("processes", 1), options.get("nodes", 1)
    if nodes > 1:
        found[NODES] = str(nodes)
    least = _amount(found.get(CORES, "0"))  # None: a word, which only such a label meets
    if processes > 1 and least is not None and least < processes:
        found[CORES] = str(processes)
    return found


def num_nodes(needs: Labels) -> int:
    """Return on how many nodes a job with these needs runs."""
    text = needs.get(NODES, "1")
    return int(text) if text.isascii() and text.isdigit() else 1


def of_node(needs: Labels) -> dict[str, str]:
    """Return what each of the nodes of a job must have, apart from a model folder."""
    return {key: value for key, value in needs.items() if key not in (MODEL, NODES)}


def model_need(path: str) -> dict[str, str]:
    """Return the need for the model folder at a path."""
    return {MODEL: path.replace("%", "%25").replace(",", "%2C")}


def model_path(needs: Labels) -> str | None:
    """Return the path of the model folder that is needed, if any."""
    text = needs.get(MODEL)
    return None if text is None else text.replace("%2C", ",").replace("%25", "%")


def unmet(needs: Labels, labels: Labels) -> dict[str, str]:
    """Return the needs that a machine with these labels does not meet."""
    return {key: value for key, value in needs.items() if not _is_met(value, labels.get(key))}


def _split(field: str, value: object) -> list[tuple[str, str]]:
    if not isinstance(value, str):
        raise wrong(field, _TAKES, value)
    parts = (part.strip().partition("=") for part in value.split(","))
    return [(key.strip(), text.strip()) for key, _, text in parts]


def _is_met(need: str, label: str | None) -> bool:
    if label is None:
        return False
    least, found = _amount(need), _amount(label)
    if least is not None and found is not None:
        return found >= least
    return need.lower() == label.lower()


def _amount(text: str) -> float | None:
    """Return the number that a text like 2, 40G or 512MiB means; None for any other text."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        return None
    power = "kmgt".index(match[2].lower()) + 1 if match[2] else 0
    factor: float = (1024 if match[3] else 1000) ** power
    return float(match[1]) * factor
