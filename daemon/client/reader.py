"""Reading jobs and groups: all that commands that change nothing need.

A command that reads takes as long as its imports. Nothing here imports what submits or steers, and
what only some homes have (groups, a run store) is imported where it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...jobs.errors import Conflict, NotFound, SpecError
from ...jobs.ids import kind_of
from ..groups.folder import (
    CURRICULUM,
    RUNNING,
    SWEEP,
    all_folders,
    group_ids,
    is_group_id,
    is_id_prefix,
    overview,
)
from .reading import Reading

if TYPE_CHECKING:
    from ..groups.folder import Folder
    from ..groups.sweep import State, Sweep, SweepFolder


class Reader(Reading):
    """Finds and reads jobs and groups."""

    # --- all groups -------------------------------------------------------------------------

    def groups(self, newest: int) -> list[dict[str, Any]]:
        """Return the newest sweeps and curricula, and all active ones, as `overview` does."""
        return overview(self.home, newest)

    def find_any(self, text: str | None, *, is_training: bool = False) -> str:
        """Return the id of a job or a group, by id, unique prefix or name. As `find`."""
        if text is None or text == "-":
            return self.find(text, is_training=is_training)
        folders = all_folders(self.home)
        matches = [folder.id for folder in folders if folder.id.startswith(text)]
        if not is_id_prefix(text) or not matches:
            matches = [folder.id for folder in folders if _name_of(folder) == text]
        if len(matches) > 1:
            kind = kind_of(matches[-1])
            raise SpecError(kind, f"{text!r} may be any of {len(matches)}: {matches[-1]}, …")
        if matches:
            return matches[0]
        if is_group_id(text):
            kind = kind_of(text)
            raise NotFound(f"{kind}: no {kind} {text!r} in {self.home.path}")
        return self.find(text)

    # --- sweeps -----------------------------------------------------------------------------

    def sweep(self, sweep_id: str) -> dict[str, Any]:
        """Return a sweep with its points, their scores and jobs. Raises NotFound and Conflict."""
        from . import sweep_views

        folder, sweep, state = self._sweep(sweep_id)
        is_active = folder.is_active  # read before the jobs, so that jobs queued meanwhile are seen
        jobs = self._jobs_of(state)
        if self.readable is not None:
            for member in state.members:  # the scores are in their events
                with suppress(NotFound):
                    self.readable.refresh(member.id)
        return sweep_views.table_of(is_active, sweep, state, jobs, self.home.runs)

    def sweeps(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the sweeps of this home, newest first, each as one line of a list of jobs."""
        found: list[dict[str, Any]] = []
        for sweep_id in reversed(group_ids(self.home, SWEEP)):
            if len(found) == limit:
                break
            with suppress(Conflict, NotFound):  # it cannot be read, or was removed just now
                from . import sweep_views

                folder, sweep, state = self._sweep(sweep_id)
                is_active = folder.is_active
                found.append(sweep_views.line_of(is_active, sweep, state, self._jobs_of(state)))
        return found

    def sweep_members(self, sweep_id: str | None = None) -> list[str]:
        """Return the ids of the jobs of a sweep, or of all sweeps."""
        found: list[str] = []
        for one in group_ids(self.home, SWEEP) if sweep_id is None else [sweep_id]:
            with suppress(Conflict, NotFound) if sweep_id is None else nullcontext():
                found += [member.id for member in self._sweep(one)[2].members]
        return found

    def _sweep(self, sweep_id: str) -> tuple[SweepFolder, Sweep, State]:
        from ..groups.sweep import SweepFolder

        folder = SweepFolder.open(self.home, sweep_id)
        return folder, folder.read(), folder.state()

    def _jobs_of(self, state: State) -> dict[str, dict[str, Any]]:
        ids = [member.id for member in state.members]
        return {job["id"]: job for job in self.several(ids)}

    # --- curricula --------------------------------------------------------------------------

    def curriculum(self, curriculum_id: str) -> dict[str, Any]:
        """Return a curriculum with its attempts, jobs and decisions. Raises NotFound, Conflict."""
        from ..groups.curriculum import CurriculumFolder

        folder = CurriculumFolder.open(self.home, curriculum_id)
        plan, state = folder.read(), folder.state()
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
            "model": state.begin_of(len(plan.stages)),  # the latest that passed a gate
        }

    def curricula(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the curricula of this home, newest first."""
        found: list[dict[str, Any]] = []
        for one in reversed(group_ids(self.home, CURRICULUM)):
            if len(found) == limit:
                break
            with suppress(Conflict, NotFound):
                found.append(self.curriculum(one))
        return found


def _progress(job: Mapping[str, Any] | None) -> dict[str, Any]:
    if job is None:
        return {"status": "removed", "step": None, "steps_total": None}
    status = "paused" if job["paused"] else job["status"]
    return {"status": status, "step": job["step"], "steps_total": job["steps_total"]}


def _name_of(folder: Folder) -> Any:
    with suppress(Conflict, NotFound):
        return folder.read_plan().get("name")
    return None
