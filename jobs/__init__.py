"""The job kinds, one file each. Adding one adds its line here."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from .errors import NotFound
from .spec import Spec

KINDS = {
    "grpo": "GrpoSpec",
}


def kind_module(kind: str) -> ModuleType:
    """Return the module of a kind: it has the Spec class and `run(spec, ctx)`. Raises NotFound."""
    if kind not in KINDS:
        raise NotFound(f"kind: must be one of {', '.join(KINDS)}, got {kind!r}")
    return import_module(f".{kind}", __name__)


def spec_class(kind: str) -> type[Spec]:
    """Return the Spec class of a kind. Imports no heavy library. Raises NotFound."""
    spec: type[Spec] = getattr(kind_module(kind), KINDS[kind])
    return spec
