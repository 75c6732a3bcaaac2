"""Sweeps and curricula of a client: finding, reading and submitting them.

A command that reads takes as long as its imports: what submits is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import redis

from ...jobs.errors import Conflict, NotFound, SpecError
from ...jobs.ids import kind_of
from ..groups.folder import (
    CURRICULUM,
    RUNNING,
    SWEEP,
    Folder,
    all_folders,
    group_ids,
    is_group_id,
    is_id_prefix,
    overview,
)
from ..lifecycle.queueing import AT_ONCE, Queueing
from ..runs import labels
from ..runs.labels import Labels
from .connection import needs_redis
from .group_names import name_of, named_groups

if TYPE_CHECKING:
    from ...configs.config import ModelConfig
    from ..groups.curriculum import Curriculum, CurriculumFolder
    from ..groups.sweep import State, Sweep, SweepFolder
    from ..runs.weights import Weights
    from .connection import Connection
    from .jobs import Jobs


class Groups:
    """The groups of a client. The methods raise what `Connection.asking` does."""

    def __init__(self, client: Connection, jobs: Jobs) -> None:
        self._client = client
        self._jobs = jobs

    def overview(self, newest: int) -> list[dict[str, Any]]:
        """Return the newest sweeps and curricula, and all active ones: see `folder.overview`."""
        return overview(self._client.home, newest)

    def names(self, ids: Iterable[str]) -> dict[str, str]:
        """Return the names of those of these groups that have one, by id."""
        named = ((group_id, name_of(Folder(self._client.home, group_id))) for group_id in ids)
        return {group_id: name for group_id, name in named if name is not None}

    def find_any(self, text: str | None, *, is_training: bool = False) -> str:
        """Return the id of a job or a group, by id, unique prefix or name. As `find`."""
        if text is None or text == "-":
            return self._client.find(text, is_training=is_training)
        home = self._client.home
        matches = []
        if is_id_prefix(text):
            matches = [folder.id for folder in all_folders(home) if folder.id.startswith(text)]
        if not matches and (matches := named_groups(home, text)):
            matches += labels.fitting(home.runs, Labels(name=text))
        if len(matches) > 1:
            listed = labels.first_of(matches)
            raise SpecError(kind_of(matches[0]), f"{text!r} may be any of {len(matches)}: {listed}")
        if matches:
            return matches[0]
        if is_group_id(text):
            kind = kind_of(text)
            raise NotFound(f"{kind}: no {kind} {text!r} in {self._client.home.path}")
        return self._client.find(text)

    def named(self, kind: str, text: str) -> str:
        """Return the id of the group of a kind that a whole id or a name names; `-`: the latest.

        Raises SpecError if several have the name, and NotFound.
        """
        home = self._client.home
        if is_group_id(text):
            return text
        found = group_ids(home, kind)[-1:] if text == "-" else named_groups(home, text, (kind,))
        if len(found) > 1:
            raise labels.ambiguous(kind, text, found, "groups")
        if not found:
            raise NotFound(f"{kind}: no {kind} {text[:80]!r}")
        return found[0]

    # --- sweeps -----------------------------------------------------------------------------

    def sweep(self, sweep_id: str) -> dict[str, Any]:
        """Return a sweep with its points, their scores and jobs. Raises NotFound and Conflict."""
        from . import sweep_views

        folder, sweep, state = self._sweep(sweep_id)
        is_active = folder.is_active  # read before the jobs, so that jobs queued meanwhile are seen
        jobs = self._jobs_of(state)
        if self._client.readable is not None:
            for member in state.members:  # the scores are in their events
                with suppress(NotFound):
                    self._client.readable.refresh(member.id)
        return sweep_views.table_of(is_active, sweep, state, jobs, self._client.home.runs)

    def sweeps(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the sweeps of this home, newest first, each as one line of a list of jobs."""
        found: list[dict[str, Any]] = []
        for sweep_id in reversed(group_ids(self._client.home, SWEEP)):
            if len(found) == limit:
                break
            with suppress(Conflict, NotFound):  # it cannot be read, or was removed just now
                found.append(self._sweep_line(sweep_id))
        return found

    def _sweep_line(self, sweep_id: str) -> dict[str, Any]:
        from . import sweep_views

        folder, sweep, state = self._sweep(sweep_id)
        is_active = folder.is_active
        return sweep_views.line_of(is_active, sweep, state, self._jobs_of(state))

    def sweep_members(self, sweep_id: str | None = None) -> list[str]:
        """Return the ids of the jobs of a sweep, or of all sweeps."""
        found: list[str] = []
        for one in group_ids(self._client.home, SWEEP) if sweep_id is None else [sweep_id]:
            with suppress(Conflict, NotFound) if sweep_id is None else nullcontext():
                found += [member.id for member in self._sweep(one)[2].members]
        return found

    def gate_jobs(self) -> list[str]:
        """Return the ids of the evaluations at the gates of all curricula."""
        from ..groups.curriculum import CurriculumFolder

        found: list[str] = []
        for curriculum_id in group_ids(self._client.home, CURRICULUM):
            with suppress(Conflict, NotFound):  # it cannot be read, or was removed just now
                state = CurriculumFolder.open(self._client.home, curriculum_id).state()
                for attempt in state.attempts:
                    for one in attempt.rounds:
                        found += [one.before, one.after]
        return found

    def _sweep(self, sweep_id: str) -> tuple[SweepFolder, Sweep, State]:
        from ..groups.sweep import SweepFolder

        folder = SweepFolder.open(self._client.home, sweep_id)
        return folder, folder.read(), folder.state()

    def _jobs_of(self, state: State) -> dict[str, dict[str, Any]]:
        ids = [member.id for member in state.members]
        return {job["id"]: job for job in self._jobs.several(ids)}

    # --- curricula --------------------------------------------------------------------------

    def curriculum(self, curriculum_id: str) -> dict[str, Any]:
        """Return a curriculum with its attempts, jobs and decisions. Raises NotFound, Conflict."""
        from ..groups.curriculum import CurriculumFolder

        folder = CurriculumFolder.open(self._client.home, curriculum_id)
        plan, state = folder.read(), folder.state()
        jobs = {job["id"]: job for job in self._jobs.several(state.jobs)}
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
            "model": state.begin_of(len(plan.stages)),  # the latest that passed a gate
        }

    def curricula(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the curricula of this home, newest first."""
        found: list[dict[str, Any]] = []
        for one in reversed(group_ids(self._client.home, CURRICULUM)):
            if len(found) == limit:
                break
            with suppress(Conflict, NotFound):
                found.append(self.curriculum(one))
        return found

    def members(self, group_id: str) -> list[str]:
        """Return the ids of the existing jobs of a group."""
        from ..groups import actions

        return [
            job["id"] for job in self._jobs.several(actions.jobs_of(self._client.home, group_id))
        ]

    # --- submitting ----------------------------------------------------------------------------

    @needs_redis
    def submit_sweep(
        self,
        kind: str,
        values: Mapping[str, Any],
        given: Mapping[str, Any],
        queueing: Queueing = AT_ONCE,
        *,
        init: Weights | None = None,
        model: ModelConfig | None = None,
        origin: str = "cli",
        submitted_by: str | None = None,
    ) -> str:
        """Check and queue all jobs of a sweep; return its id.

        Arguments as for `sweep_plans.plan` and `Jobs.submit`; `submitted_by`: the name of the HTTP
        request's token. Once the folder of the sweep is there, the daemon finishes the
        submission if this process does not. Raises SpecError, NotFound and Unavailable.
        """
        from ..groups.sweep import SweepFolder
        from . import sweep_plans
        from .capacity import check_deciding_daemon
        from .trained import check_name

        check_name(self._client.config, queueing.name)
        sweep, state = sweep_plans.plan(
            self._jobs, kind, values, given, queueing, init=init, model=model
        )
        if sweep.halving is not None or sweep.search is not None:
            check_deciding_daemon(self._client, SWEEP)
        base = sweep.document["spec"]
        self._jobs.check_ready([base, *({**base, **one.changes} for one in state.members)])
        found = self._jobs.found(queueing).to_json()
        document = _with_origin(sweep.document, origin, submitted_by)
        sweep = replace(sweep, origin=origin, queueing=found, document=document)
        # The trials of a search are chosen by the daemon, which may import Optuna.
        return self._begin(SweepFolder, sweep, state, init, advance=sweep.search is None)

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
        from ..groups.curriculum import CurriculumFolder
        from . import curriculum_plans
        from .capacity import check_deciding_daemon
        from .trained import check_name

        check_name(self._client.config, queueing.name)
        plan, state = curriculum_plans.plan(self._jobs, kind, values, given, queueing, init=init)
        check_deciding_daemon(self._client, CURRICULUM)
        self._jobs.check_ready(stage.document["spec"] for stage in plan.stages)
        own: dict[str, str] | None = None
        if init is not None:
            folder = self._client.home.curricula / plan.id / "init"
            own = {"name": f"{plan.id}:init", "path": str(folder)}

        def changed(document: dict[str, Any]) -> dict[str, Any]:
            document = _with_origin(document, origin, submitted_by)
            if own is None:
                return document
            return {**document, "model": {**document["model"], **own}}

        stages = [replace(stage, document=changed(stage.document)) for stage in plan.stages]
        gate = None if plan.gate is None else changed(plan.gate)
        plan = replace(plan, origin=origin, stages=stages, gate=gate)
        return self._begin(CurriculumFolder, plan, state, init)

    def _begin(
        self,
        folder: type[SweepFolder | CurriculumFolder],
        plan: Sweep | Curriculum,
        state: object,
        init: Weights | None,
        *,
        advance: bool = True,
    ) -> str:
        """Write the folder of a group; with `advance` queue its first jobs. Return its id."""
        from ..groups import driver
        from ..runs import weights

        with folder.creating(self._client.home, plan, state) as staging:
            if init is not None:
                weights.link(init, staging / "init")
        if advance:
            with suppress(redis.RedisError, OSError):  # the daemon finishes it
                driver.advance(self._client.places, folder(self._client.home, plan.id))
        return plan.id


def _progress(job: Mapping[str, Any] | None) -> dict[str, Any]:
    if job is None:
        return {"status": "removed", "step": None, "steps_total": None}
    status = "paused" if job["paused"] else job["status"]
    return {"status": status, "step": job["step"], "steps_total": job["steps_total"]}


def _with_origin(document: dict[str, Any], origin: str, token: str | None) -> dict[str, Any]:
    """Return the spec.json of a job with what depends on the origin of its submission.

    `origin`: one of rundir.ORIGINS. `token`: the name of the HTTP request's token, if it has one.
    """
    if origin != "http":
        return document
    # No folder to import modules from: an HTTP request must not name code.
    return {**document, "python_path": [], "submitted_by": token}
