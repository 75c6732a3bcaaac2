"""Groups of jobs: a sweep or a curriculum can be steered and removed like a job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ...jobs.errors import Conflict, NotFound, SpecError
from ...jobs.ids import kind_of
from ..groups import actions
from ..groups.folder import CANCELED, PAUSED, RUNNING, is_group_id
from ..lifecycle import remove, steer
from ..lifecycle.resume import changed_sources, resume
from .connection import needs_redis
from .curricula import Curricula
from .sweeping import Sweeping


class Grouping(Sweeping, Curricula):
    """Steers and removes jobs and groups."""

    def group_members(self, group_id: str) -> list[str]:
        """Return the ids of the existing jobs of a group."""
        return [job["id"] for job in self.several(actions.jobs_of(self.home, group_id))]

    def changed_sources(self, job_id: str) -> list[str]:
        """Return the reward sources that changed since the latest checkpoint of a job, or of any
        job of a group that can be resumed."""
        if not is_group_id(job_id):
            return changed_sources(self.rundir(job_id))
        files: dict[str, None] = {}
        for member_id in actions.to_resume(self.home, job_id):
            with suppress(NotFound):
                files |= dict.fromkeys(changed_sources(self.rundir(member_id)))
        return list(files)

    # --- acting on all jobs -----------------------------------------------------------------

    @needs_redis
    def cancel(self, job_id: str) -> str:
        """Cancel a job, or all jobs of a group; nothing of it continues then."""
        return self._steer(job_id, CANCELED, partial(steer.cancel, self.places))

    def cancel_if_pending(self, job_id: str) -> bool:
        """Cancel a job unless it has ended; return whether it had not."""
        try:
            self.cancel(job_id)
        except Conflict:
            return False
        return True

    @needs_redis
    def kill(self, job_id: str) -> str:
        """Kill a job, or all jobs of a group."""
        return self._steer(job_id, CANCELED, partial(steer.kill, self.places))

    @needs_redis
    def pause(self, job_id: str, *, release: bool = False) -> str:
        """Pause a job, or all jobs of a group."""
        return self._steer(job_id, PAUSED, partial(steer.pause, self.places, release=release))

    @needs_redis
    def unpause(self, job_id: str) -> str:
        """Continue a paused job, or all those of a group."""
        return self._steer(job_id, RUNNING, partial(steer.unpause, self.places))

    @needs_redis
    def move(self, job_id: str, position: int) -> int:
        """Move a queued job to a position of its queue, as `steer.move`."""
        return steer.move(self.places, job_id, position)

    def _steer(self, job_id: str, phase: str, act: Callable[[str], str]) -> str:
        """Act on a job; for a group, set its phase and act on its jobs."""
        if is_group_id(job_id):
            return actions.steer(self.places, job_id, phase, act)
        return act(job_id)

    @needs_redis
    def resume(
        self,
        job_id: str,
        *,
        changes: Mapping[str, Any] | None = None,
        front: bool = False,
        strict: bool = False,
    ) -> str:
        """Queue an ended job again, or the jobs of a group that have not done their part."""
        again = partial(resume, self.places, self.config, front=front, strict=strict)
        if not is_group_id(job_id):
            return again(job_id, changes=changes)
        if changes:
            kind = kind_of(job_id)
            raise SpecError(next(iter(changes)), f"cannot change for all jobs of a {kind}")
        return actions.resume(self.places, job_id, again)

    def check_removal(self, ids: Sequence[str]) -> None:
        """Raise Conflict for a job, or a job of a group, that runs, waits or is needed by others.

        Jobs that are removed together may need each other.
        """
        jobs = []
        for one in ids:
            if is_group_id(one):
                jobs += self.several(self.group_members(one))
            else:
                jobs.append(self.job(one))
        removed = {job["id"] for job in jobs}
        needed = self.needed()
        for job in jobs:
            remove.refuse_removal(
                job, [one for one in needed.get(job["id"], ()) if one not in removed]
            )

    @needs_redis
    def remove(self, job_id: str) -> int:
        """Remove an ended job, or a group with all its jobs; return the bytes freed."""
        if not is_group_id(job_id):
            return remove.remove(self.places, job_id)
        self.check_removal([job_id])
        folder, jobs = actions.close(self.home, job_id)
        freed = sum(remove.remove(self.places, one) for one in jobs)
        folder.remove()
        return freed

    @needs_redis
    def finish_removals(self) -> dict[str, int]:
        """Finish interrupted removals; return the bytes freed for each job."""
        return remove.finish_all(self.places)

    @needs_redis
    def remove_resume_state(self, job_id: str) -> int:
        """As `remove.remove_resume_state`."""
        return remove.remove_resume_state(self.places, job_id)

    @needs_redis
    def ended(self, statuses: Collection[str], *, before: float) -> list[str]:
        """As `remove.ended`."""
        return remove.ended(self.places, statuses, before=before)

    @needs_redis
    def needed(self) -> dict[str, list[str]]:
        """As `remove.needed`."""
        return remove.needed(self.places)
