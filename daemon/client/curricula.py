"""Submission of curricula."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import redis

from ...jobs import spec_class
from ...jobs.errors import SpecError
from ...jobs.ids import fresh_id
from ...jobs.intervals import LEVEL
from ...jobs.training.options import TrainingSpec
from ..groups import driver
from ..groups.curriculum import Attempt, Curriculum, CurriculumFolder, Stage, State
from ..groups.folder import CURRICULUM, RUNNING
from ..groups.stage_options import gate_of, stages_of
from ..lifecycle.queueing import AT_ONCE, Queueing
from ..runs import weights
from ..runs.weights import Weights
from .capacity import check_deciding_daemon
from .connection import needs_redis
from .reader import Reader
from .submitting import Submitting

_EVAL = "eval"
_REFUSED = {"after": "after", "at": "at", "delay_s": "in"}  # of Queueing: the option


class Curricula(Submitting, Reader):
    """Submits curricula."""

    def plan_curriculum(
        self,
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
                document = self.check(spec.parse({**values, **stage.options}), init=init)
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
                evaluation = self.check(spec_class(_EVAL).parse(options), init=init)
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

    @needs_redis
    def submit_curriculum(
        self,
        kind: str,
        values: Mapping[str, Any],
        given: Mapping[str, Any],
        queueing: Queueing = AT_ONCE,
        *,
        init: Weights | None = None,
        origin: str = "cli",
        submitted_by: str | None = None,
    ) -> str:
        """Check a curriculum and queue its first stage; return its id.

        Arguments as for `submit_sweep`. Once its folder exists, the daemon advances it from stage
        to stage.
        """
        plan, state = self.plan_curriculum(kind, values, given, queueing, init=init)
        check_deciding_daemon(self, "curriculum")
        self.check_ready(stage.document["spec"] for stage in plan.stages)
        plan = replace(plan, origin=origin)
        if origin == "http":  # no folder to import from: a request must not name code
            http: dict[str, Any] = {"python_path": [], "submitted_by": submitted_by}
            plan = _with_all(plan, lambda document: {**document, **http})
        if init is not None:
            own = {"name": f"{plan.id}:init", "path": str(self.home.curricula / plan.id / "init")}
            plan = _with_all(plan, lambda document: _with_model(document, own))
        with CurriculumFolder.creating(self.home, plan, state) as staging:
            if init is not None:
                weights.link(init, staging / "init")
        with suppress(redis.RedisError, OSError):  # the daemon finishes it
            driver.advance(self.places, CurriculumFolder(self.home, plan.id))
        return plan.id


def _with_all(
    plan: Curriculum, change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> Curriculum:
    """The plan with the spec.json of each stage changed, and of the gate if it has one."""
    stages = [replace(stage, document=change(stage.document)) for stage in plan.stages]
    return replace(plan, stages=stages, gate=None if plan.gate is None else change(plan.gate))


def _with_model(document: Mapping[str, Any], model: Mapping[str, str]) -> dict[str, Any]:
    return {**document, "model": {**document["model"], **model}}
