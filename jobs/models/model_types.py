"""Checks whether the `model_type` in a config.json can be loaded. Imports no torch.

Models that bring their own code (`auto_map`) are loaded by the class of the installed transformers
or not at all: nothing in a model folder is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import SpecError

_OWN = {"code_graph"}  # jobs/codegraph registers it
# transformers lists its types in these files, as ("bert", "BertConfig") and "bert": "BertConfig".
# They are read, not imported: the import takes seconds, and a job is checked in milliseconds.
_FILES = ("auto_mappings.py", "configuration_auto.py")
_ENTRY = re.compile(r'"([\w.-]+)"\s*[,:]\s*"\w+"')


@cache
def known_types() -> frozenset[str]:
    """Return the model types of the installed transformers and of warmd; empty if unreadable."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return frozenset()
    folder = Path(found.origin).parent / "models" / "auto"
    try:
        texts = [(folder / name).read_text() for name in _FILES]
    except OSError:
        return frozenset()  # laid out differently: the loading of the model decides
    types = {name for text in texts for name in _ENTRY.findall(text)}
    return frozenset(types | _OWN)


def check_type(field: str, config: Mapping[str, Any]) -> None:
    """Check by a config.json that its type of model can be loaded. Raises SpecError for `field`."""
    name = config.get("model_type")
    known = known_types()
    if name is None or not known or (isinstance(name, str) and name in known):
        return
    own_code = ", and runs no code of a model (auto_map)" if "auto_map" in config else ""
    shown = repr(name) if len(repr(name)) <= 80 else f"{repr(name)[:80]}…"
    raise SpecError(
        field,
        f"must have a model_type that the installed transformers knows, got {shown}: "
        f"warmd loads models by the classes of transformers{own_code}",
    )
