"""Curricula: submission, and what can be done with one by its id."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import redis

from ...jobs import spec_class
from ...jobs.errors import Conflict, NotFound, SpecError
from ...jobs.training.options import TrainingSpec
from ..curriculum import folder as curricula, stages
from ..curriculum.folder import Attempt, Curriculum, CurriculumFolder, Stage, State
from ..curriculum.plan import gate_of, stages_of
from ..queue import runs_owner
from ..runs import weights
from ..runs.labels import NO_LABELS, Labels
from ..runs.rundir import fresh_id
from ..runs.weights import Weights
from ..sweeps import group
from ..sweeps.group import CANCELED, PAUSED, RUNNING
from .connection import needs_redis
from .sweeping import Sweeping

_EVAL = "eval"


class Curricula(Sweeping):
    """Submits curricula, and acts on the job that one is at."""

    def plan_curriculum(
        self,
        kind: str,
        values: Mapping[str, Any],
        given: Mapping[str, Any],
        *,
        init: Weights | None = None,
        labels: Labels = NO_LABELS,
    ) -> tuple[Curriculum, State]:
        """Check the stages and the gate; queue nothing.

        `values`: raw options of the kind, for all stages. `given`: raw `stages` and `gate`. Raises
        SpecError, naming the stage, and NotFound. Needs no Redis.
        """
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
            id=fresh_id(curricula.KIND),
            kind=kind,
            created=round(time.time(), 3),
            name=labels.name,
            tags=list(labels.tags),
            stages=found,
            gate=evaluation,
            questions=0 if gate is None else gate.questions,
            most_questions=0 if gate is None else gate.most_questions,
            queueing={},
        )
        return plan, State(RUNNING, [Attempt(0, 0, fresh_id(kind))])

    @needs_redis
    def submit_curriculum(
        self,
        kind: str,
        values: Mapping[str, Any],
        given: Mapping[str, Any],
        *,
        front: bool = False,
        retries: int = 0,
        timeout_s: float | None = None,
        init: Weights | None = None,
        origin: str = "cli",
        labels: Labels = NO_LABELS,
        needs: Mapping[str, str] | None = None,
    ) -> str:
        """Check a curriculum and queue its first stage; return its id. Arguments as for `submit`.

        Once its folder is there, the daemon takes it from stage to stage.
        """
        plan, state = self.plan_curriculum(kind, values, given, init=init, labels=labels)
        self.connection.ping()
        self.home.create()
        if self.config.redis_url is not None:
            runs_owner.claim(self.connection, self.home)
        queueing = {"front": front, "retries": retries, "timeout_s": timeout_s, "needs": needs}
        plan = replace(plan, queueing=queueing, origin=origin)
        if needs:
            plan = _with_stages(plan, lambda document: {**document, "needs": dict(needs)})
        if origin == "http":  # no folder to import from: a request must not name code
            plan = _with_all(plan, lambda document: {**document, "python_path": []})
        if init is not None:
            own = {"name": f"{plan.id}:init", "path": str(self.home.curricula / plan.id / "init")}
            plan = _with_all(plan, lambda document: _with_model(document, own))
        with CurriculumFolder.creating(self.home, plan, state) as staging:
            if init is not None:
                weights.link(init, staging / "init")
        with suppress(redis.RedisError, OSError):  # the daemon finishes it
            stages.advance(self.store, self.home.runs, CurriculumFolder(self.home, plan.id))
        return plan.id

    def curriculum(self, curriculum_id: str) -> dict[str, Any]:
        """Return a curriculum with its attempts, jobs and decisions. Raises NotFound, Conflict."""
        _, plan, state = self._curriculum(curriculum_id)
        jobs = {job["id"]: job for job in self.several(state.jobs)}
        attempts = [
            {
                "stage": plan.stages[attempt.stage].name,
                "attempt": attempt.number + 1,
                "job": attempt.job,
                **_progress(jobs.get(attempt.job)),
                "questions": attempt.rounds[-1].questions if attempt.rounds else None,
                "evaluations": [asdict(one) for one in attempt.rounds],
                "decision": attempt.decision,
                "comparison": attempt.comparison,
            }
            for attempt in state.attempts
        ]
        return {
            "id": plan.id,
            "kind": plan.kind,
            "name": plan.name,
            "tags": plan.tags,
            "status": "started" if state.phase == RUNNING else state.phase,
            "problem": state.problem,
            "created_at": plan.created,
            "stages": [stage.name for stage in plan.stages],
            "attempts": attempts,
            "jobs": state.jobs,
            "model": _last_kept(plan, state),
        }

    def curricula(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the curricula of this home, newest first."""
        found: list[dict[str, Any]] = []
        for one in reversed(curricula.curriculum_ids(self.home)):
            if len(found) == limit:
                break
            with suppress(Conflict, NotFound):
                found.append(self.curriculum(one))
        return found

    def groups(self, newest: int) -> list[dict[str, Any]]:
        """Return the newest sweeps and curricula, and all active ones, as `group.overview` does."""
        return group.overview((self.home.sweeps, self.home.curricula), newest)

    def _curriculum(self, curriculum_id: str) -> tuple[CurriculumFolder, Curriculum, State]:
        folder = CurriculumFolder.open(self.home, curriculum_id)
        return folder, folder.read(), folder.state()

    def _is_named(self, curriculum_id: str, name: str) -> bool:
        with suppress(Conflict, NotFound):
            return self._curriculum(curriculum_id)[1].name == name
        return False

    def find_any(self, text: str | None) -> str:
        """Return the id of a job, a sweep or a curriculum, by id, unique prefix or name."""
        if text is not None and text != "-":
            known = curricula.curriculum_ids(self.home)
            is_id = text.startswith(curricula.KIND)
            matches = [one for one in known if is_id and one.startswith(text)]
            matches = matches or [one for one in known if self._is_named(one, text)]
            if len(matches) > 1:
                raise SpecError("curriculum", f"{text!r} may be any of {len(matches)}")
            if matches:
                return matches[0]
        return super().find_any(text)

    # --- acting -----------------------------------------------------------------------------

    def cancel(self, job_id: str) -> str:
        """Cancel a job, or the jobs of a group."""
        if not curricula.is_curriculum_id(job_id):
            return super().cancel(job_id)
        return self._at_current(job_id, CANCELED, super().cancel)

    def kill(self, job_id: str) -> str:
        """Kill a job, or the jobs of a group."""
        if not curricula.is_curriculum_id(job_id):
            return super().kill(job_id)
        return self._at_current(job_id, CANCELED, super().kill)

    def pause(self, job_id: str, *, release: bool = False) -> str:
        """Pause a job, or the jobs of a group."""
        pause = super().pause
        if not curricula.is_curriculum_id(job_id):
            return pause(job_id, release=release)
        return self._at_current(job_id, PAUSED, lambda one: pause(one, release=release))

    def unpause(self, job_id: str) -> str:
        """Continue a paused job, or those of a group."""
        if not curricula.is_curriculum_id(job_id):
            return super().unpause(job_id)
        return self._at_current(job_id, RUNNING, super().unpause)

    def resume(
        self,
        job_id: str,
        *,
        changes: Mapping[str, Any] | None = None,
        front: bool = False,
        strict: bool = False,
    ) -> str:
        """Queue an ended job again, or the job that a group ended at."""
        resume = super().resume
        if not curricula.is_curriculum_id(job_id):
            return resume(job_id, changes=changes, front=front, strict=strict)
        if changes:
            raise SpecError(next(iter(changes)), "cannot change for a curriculum")
        _, _, state = self._curriculum(job_id)
        if state.phase == curricula.FINISHED or state.attempts[-1].decision == curricula.GIVE_UP:
            raise Conflict(f"curriculum: {job_id} has ended: nothing to resume")
        return self._at_current(
            job_id, RUNNING, lambda one: resume(one, front=front, strict=strict)
        )

    def changed_sources(self, job_id: str) -> list[str]:
        """Return the changed reward sources of a job or a group."""
        if not curricula.is_curriculum_id(job_id):
            return super().changed_sources(job_id)
        return super().changed_sources(self._curriculum(job_id)[2].attempts[-1].job)

    def group_members(self, group_id: str) -> list[str]:
        """Return the ids of the jobs of a sweep or a curriculum that are there."""
        if curricula.is_curriculum_id(group_id):
            ids = self._curriculum(group_id)[2].jobs
        else:
            ids = self.sweep_members(group_id)
        return [job["id"] for job in self.several(ids)]

    def remove(self, job_id: str) -> int:
        """Remove an ended job, or a group with all its jobs; return the bytes freed."""
        if not curricula.is_curriculum_id(job_id):
            return super().remove(job_id)
        self.check_removal([job_id])
        folder, _, state = self._curriculum(job_id)
        with folder.changing():
            folder.update(state, phase=CANCELED)
        freed = sum(super(Curricula, self).remove(one) for one in reversed(state.jobs))
        folder.remove()
        return freed

    @needs_redis
    def _at_current(self, curriculum_id: str, phase: str, act: Callable[[str], str]) -> str:
        """Set the phase, then act on those jobs that allow it."""
        folder, _, state = self._curriculum(curriculum_id)
        with folder.changing():
            state = folder.state()
            if phase != RUNNING and state.phase in (curricula.FINISHED, curricula.FAILED, phase):
                raise Conflict(f"curriculum: {curriculum_id} is {state.phase} already")
            folder.update(state, phase=phase, problem=None)
            folder.set_active(phase == RUNNING)
        outcomes = []
        for job_id in state.jobs:
            with suppress(Conflict, NotFound):  # it has ended, or was not queued yet
                outcomes.append(act(job_id))
        return ", ".join(found for found in outcomes if found != "finished") or phase


_Change = Callable[[Mapping[str, Any]], dict[str, Any]]  # of a spec.json


def _with_stages(plan: Curriculum, change: _Change) -> Curriculum:
    stages = [replace(stage, document=change(stage.document)) for stage in plan.stages]
    return replace(plan, stages=stages)


def _with_all(plan: Curriculum, change: _Change) -> Curriculum:
    """The plan with changed stages, and a changed gate if it has one."""
    plan = _with_stages(plan, change)
    return plan if plan.gate is None else replace(plan, gate=change(plan.gate))


def _with_model(document: Mapping[str, Any], model: Mapping[str, str]) -> dict[str, Any]:
    return {**document, "model": {**document["model"], **model}}


def _progress(job: Mapping[str, Any] | None) -> dict[str, Any]:
    if job is None:
        return {"status": "removed", "step": None, "steps_total": None}
    status = "paused" if job["paused"] else job["status"]
    return {"status": status, "step": job["step"], "steps_total": job["steps_total"]}


def _last_kept(plan: Curriculum, state: State) -> str | None:
    """The job whose model is the latest that a gate has let through."""
    return state.begin_of(len(plan.stages))
