"""The job kinds: what a job does, given its options, a model and a run directory.

A kind is a spec (its options and their checks) and `run(spec, ctx)`, which emits events, writes
checkpoints and returns the result. Everything here works without the daemon: tests call `run`
directly. A kind of warmd has a line in KINDS; a kind of another package has an entry point
(`registry.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from .errors import SpecError
from .registry import Kind, Kinds

if TYPE_CHECKING:
    from .context import Context
    from .spec import Spec

KINDS = Kinds(
    {
        "grpo": Kind(".grpo.options", "GrpoSpec", ".grpo.kind", ".grpo.setup"),
        "sft": Kind(".sft.options", "SftSpec", ".sft.kind", ".sft.task"),
        "dpo": Kind(".dpo.options", "DpoSpec", ".dpo.kind", ".dpo.task"),
        "mlm": Kind(".mlm.options", "MlmSpec", ".mlm.kind", ".mlm.task"),
        "encode": Kind(".encode.options", "EncodeSpec", ".encode.kind", ".encode.embedder"),
        "eval": Kind(".eval.options", "EvalSpec", ".eval.kind", ".eval.tasks"),
        "infer": Kind(".infer.options", "InferSpec", ".infer.kind", ".infer.answering"),
    }
)


class Run(Protocol):
    """The work of a kind."""

    def __call__(self, spec: Any, ctx: Context, /) -> dict[str, Any]:
        """Run the job; resume from `ctx.checkpoints.latest()` when there is one.

        Returns the result as plain JSON values. Raises Stopped after saving when `ctx.stop` is
        set, JobFailed when the job cannot continue.
        """


def spec_class(kind: str) -> type[Spec]:
    """Return the Spec class of a kind. Imports no heavy library. Raises SpecError."""
    found = _kind(kind)
    return cast("type[Spec]", getattr(_module(found.options), found.spec))


def stored_options(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a stored job; an earlier version's defaults replace missing options."""
    return spec_class(kind).of_stored(options) if kind in KINDS else dict(options)


def run_function(kind: str) -> Run:
    """Return the `run` of a kind. Raises SpecError."""
    return cast(Run, _module(_kind(kind).module).run)


def import_all(kind: str) -> None:
    """Import everything that a kind needs to run; the zygote calls this once."""
    _module(_kind(kind).heavy)
    run_function(kind)  # its module, which would otherwise take 6 to 14 ms of each job
    spec_class(kind).options()  # cached: reading the annotations takes 4 ms


def _kind(kind: str) -> Kind:
    if kind not in KINDS:
        raise SpecError("kind", f"must be one of {', '.join(KINDS)}, got {kind!r}")
    return KINDS[kind]


# Modules of earlier versions that kinds of other packages may import.
_GONE = {
    f"{__name__}.training.{name}": "there is no JobTrainer any more: a kind is a task of "
    f"{__name__}.training.loop (docs/kinds.md)"
    for name in ("checkpointing", "evaluation", "trainer")
}


def _module(name: str) -> Any:
    try:
        return import_module(name, __name__)
    except ModuleNotFoundError as error:
        if error.name not in _GONE:
            raise
        raise ModuleNotFoundError(f"{error}: {_GONE[error.name]}", name=error.name) from error
