"""Which chat templates TRL has a training variant of, found without importing it.

The import of TRL takes seconds, and a submission has none. Its variants are files beside those
that they replace: FAMILY.jinja and FAMILY_training.jinja.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

NOT_MARKED = (
    "for this model: its chat template does not mark what the assistant says ({% generation %}), "
    "and TRL has no variant of it that does"
)
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_VARIANT = "_training"


def marks_assistant(source: str) -> bool:
    """Whether a template marks what the assistant says, or TRL has a variant of it that does.

    Also where TRL has no such files: it is known when the job begins.
    """
    if _MARK.search(source):
        return True
    known = _replaced()
    return not known or source in known


@cache
def _replaced() -> frozenset[str]:
    """The templates that TRL has a variant of; empty if its files are not found."""
    found = find_spec("trl")
    if found is None or found.origin is None:
        return frozenset()
    folder = Path(found.origin).parent / "chat_templates"
    variants = folder.glob(f"*{_VARIANT}.jinja")
    paths = (path.with_stem(path.stem.removesuffix(_VARIANT)) for path in variants)
    return frozenset(path.read_text(encoding="utf-8") for path in paths if path.is_file())
