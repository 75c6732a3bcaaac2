"""The plan of a curriculum: its stages and its gate, checked. Queues nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...jobs import spec_class
from ...jobs.errors import SpecError
from ...jobs.ids import fresh_id
from ...jobs.intervals import LEVEL
from ...jobs.training.options import TrainingSpec
from ..groups.curriculum import Attempt, Curriculum, Stage, State
from ..groups.folder import CURRICULUM, RUNNING
from ..groups.stage_options import gate_of, stages_of
from ..lifecycle.queueing import AT_ONCE, Queueing
from ..runs.weights import Weights

if TYPE_CHECKING:
    from .jobs import Jobs

_EVAL = "eval"
_REFUSED = {"after": "after", "at": "at", "delay_s": "in"}  # of Queueing: the option


def plan(
    jobs: Jobs,
    kind: str,
    values: Mapping[str, Any],
    given: Mapping[str, Any],
    queueing: Queueing = AT_ONCE,
    *,
    init: Weights | None = None,
) -> tuple[Curriculum, State]:
    """Check the stages and the gate; queue nothing.

    `values`: raw options of the kind, for all stages. `given`: raw `stages` and `gate`. Raises
    SpecError, naming the stage, and NotFound. Needs no Redis.
    """
    for name, option in _REFUSED.items():
        if getattr(queueing, name) is not None:
            raise SpecError(option, "must not be given together with stages")
    spec = spec_class(kind)
    if not issubclass(spec, TrainingSpec):
        raise SpecError("stages", f"must be of a kind that trains, got {kind}")
    found = []
    for stage in stages_of(given.get("stages")):
        try:
            document = jobs.check(spec.parse({**values, **stage.options}), init=init)
        except SpecError as error:
            raise SpecError("stages", f"{stage.name}: {error}") from error
        found.append(Stage(stage.name, document, stage.has_gate))
    gate = gate_of(given.get("gate"))
    evaluation: dict[str, Any] | None = None
    if gate is not None:
        model = found[0].document["spec"].get("model")
        if model is None:
            raise SpecError("gate", "must be of a model that generates text, got a new model")
        options = {**gate.options, "model": model, "samples": gate.most_questions}
        try:
            evaluation = jobs.check(spec_class(_EVAL).parse(options), init=init)
        except SpecError as error:
            raise SpecError("gate", str(error)) from error
    plan = Curriculum(
        id=fresh_id(CURRICULUM),
        kind=kind,
        created=round(time.time(), 3),
        name=queueing.name,
        tags=list(queueing.labels.tags),
        stages=found,
        gate=evaluation,
        questions=0 if gate is None else gate.questions,
        most_questions=0 if gate is None else gate.most_questions,
        queueing=queueing.to_json(),
        gate_level=LEVEL,
    )
    return plan, State(RUNNING, [Attempt(0, 0, fresh_id(kind))])
