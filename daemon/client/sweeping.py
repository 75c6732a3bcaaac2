"""Sweeps: submission, reading, and acting on all jobs of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import redis

from ...configs.config import ModelConfig
from ...configs.queues import TRAIN
from ...jobs import spec_class
from ...jobs.errors import Conflict, NotFound, SpecError
from ...jobs.ids import fresh_id
from ...jobs.spec import Spec
from ...jobs.training.options import TrainingSpec
from ..lifecycle.queueing import AT_ONCE, Queueing
from ..queue.jobs import ENDED
from ..runs import weights
from ..runs.weights import Weights
from ..sweeps import folder as sweeps, halving, plan, progress
from ..sweeps.folder import CANCELED, RUNNING, Member, Search, State, Sweep, SweepFolder
from ..sweeps.members import changes_of, submit_all
from ..sweeps.plan import SweepOptions
from . import sweep_views
from .capacity import check_deciding_daemon
from .connection import needs_redis
from .reading import Reading
from .submitting import Submitting


class Sweeping(Submitting, Reading):
    """Submits sweeps, and acts on all jobs of one."""

    def plan_sweep(
        self,
        kind: str,
        values: Mapping[str, Any],
        given: Mapping[str, Any],
        queueing: Queueing = AT_ONCE,
        *,
        init: Weights | None = None,
        model: ModelConfig | None = None,
    ) -> tuple[Sweep, State]:
        """Check the options of a sweep's jobs and the options it varies; queue nothing.

        `values`: raw options of the kind. `given`: raw values of `plan.KEYS`. Raises SpecError and
        NotFound. Needs no Redis.
        """
        spec = _training_spec(kind)
        options = SweepOptions.parse(given, spec)
        seed = spec.options()["seed"].convert(values.get("seed", spec.options()["seed"].default))
        documents = self._documents(spec, {**values, "seed": seed}, options, init, model)
        base = documents[0][0]
        specs = [spec.parse(document["spec"]) for of_point in documents for document in of_point]
        steps = sorted({one.steps_total for one in specs})
        for name in ("halving", "search"):
            if getattr(options, name) is not None and len(steps) > 1:
                raise SpecError(name, f"must go with equal steps, got {steps[0]} and {steps[-1]}")
        search = self._search(options)
        points = [] if search else options.points
        metric = plan.metric_for(specs[0], options.metric)
        sweep = Sweep(
            id=fresh_id(sweeps.KIND),
            kind=kind,
            created=round(time.time(), 3),
            origin="cli",
            name=queueing.name,
            tags=list(queueing.labels.tags),
            axes={name: list(found) for name, found in options.axes.items()},
            seeds=options.seeds,
            halving=options.halving,
            metric=metric,
            lower_is_better=plan.is_lower_better(spec, metric),
            rungs=plan.rungs_for(steps[-1], len(points), options.halving),
            document=base,
            queueing=queueing.to_json(),
            search=search,
        )
        members = (
            []
            if search
            else [
                Member(fresh_id(kind), index, changes_of(base["spec"], document["spec"]))
                for index, of_point in enumerate(documents)
                for document in of_point
            ]
        )
        return sweep, State(RUNNING, False, points, members, [])

    def _search(self, options: SweepOptions) -> Search | None:
        """The requested search; by default as many trials at once as this home has workers."""
        if options.search is None:
            return None
        workers = sum(worker.queue == TRAIN for worker in self.config.workers)
        return Search(
            sampler=options.search,
            trials=options.trials,
            parallel=min(options.parallel or max(workers, 1), options.trials),
            ranges=dict(options.ranges),
        )

    def _documents(
        self,
        spec: type[TrainingSpec],
        values: Mapping[str, Any],
        options: SweepOptions,
        init: Weights | None,
        model: ModelConfig | None,
    ) -> list[list[dict[str, Any]]]:
        """Return the checked spec.json of each job, by point.

        The jobs of a point differ in the seed alone, so only the first one's files are checked.
        For a search these are jobs with the ends of its ranges.
        """
        found = []
        for point in options.points:
            first = self.check(spec.parse(plan.variant(values, point, 0)), init=init, model=model)
            of_point = [first]
            for number in range(1, options.seeds):
                changed = spec.parse({**first["spec"], "seed": first["spec"]["seed"] + number})
                of_point.append({**first, "spec": changed.to_json()})
            found.append(of_point)
        return found

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

        Arguments as for `plan_sweep` and `submit`; `submitted_by`: the name of the token by which
        they came over HTTP. Once the folder of the sweep is there, the daemon finishes the
        submission if this process does not. Raises SpecError, NotFound and Unavailable.
        """
        sweep, state = self.plan_sweep(kind, values, given, queueing, init=init, model=model)
        if sweep.halving is not None or sweep.search is not None:
            check_deciding_daemon(self, "sweep")
        base = sweep.document["spec"]
        self.check_ready([base, *({**base, **member.changes} for member in state.members)])
        sweep = replace(sweep, origin=origin, queueing=self.found(queueing).to_json())
        if origin == "http":  # no folder to import from: a request must not name code
            own: dict[str, Any] = {"python_path": [], "submitted_by": submitted_by}
            sweep = replace(sweep, document={**sweep.document, **own})
        with SweepFolder.creating(self.home, sweep, state) as staging:
            if init is not None:
                weights.link(init, staging / "init")
        if sweep.search is None:  # its trials are chosen by the daemon, which may import Optuna
            with suppress(redis.RedisError, OSError):  # the daemon finishes it
                progress.advance(self.places, SweepFolder(self.home, sweep.id))
        return sweep.id

    # --- reading ----------------------------------------------------------------------------

    def sweep(self, sweep_id: str) -> dict[str, Any]:
        """Return a sweep with its points, their scores and jobs. Raises NotFound and Conflict."""
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
        for sweep_id in reversed(sweeps.sweep_ids(self.home)):
            if len(found) == limit:
                break
            with suppress(Conflict, NotFound):  # it cannot be read, or was removed just now
                folder, sweep, state = self._sweep(sweep_id)
                is_active = folder.is_active
                found.append(sweep_views.line_of(is_active, sweep, state, self._jobs_of(state)))
        return found

    def sweep_members(self, sweep_id: str | None = None) -> list[str]:
        """Return the ids of the jobs of a sweep, or of all sweeps."""
        found: list[str] = []
        for one in sweeps.sweep_ids(self.home) if sweep_id is None else [sweep_id]:
            with suppress(Conflict, NotFound) if sweep_id is None else nullcontext():
                found += [member.id for member in self._sweep(one)[2].members]
        return found

    def _sweep(self, sweep_id: str) -> tuple[SweepFolder, Sweep, State]:
        folder = SweepFolder.open(self.home, sweep_id)
        return folder, folder.read(), folder.state()

    def _jobs_of(self, state: State) -> dict[str, dict[str, Any]]:
        ids = [member.id for member in state.members]
        return {job["id"]: job for job in self.several(ids)}

    # --- acting on all jobs -----------------------------------------------------------------

    def resume_sweep(self, sweep_id: str, resume: Callable[[str], str]) -> str:
        """Queue all jobs of a sweep that have not done their part.

        Jobs of points that were not kept at a rung stay as they are.
        """
        _, sweep, state = self._sweep(sweep_id)
        rung = sweep.rungs[len(state.decisions)] if len(sweep.rungs) > 1 else None

        def resume_member(member_id: str) -> str:
            member = next(one for one in state.members if one.id == member_id)
            job = self.store.fetch(member_id)
            is_due = member.point in state.kept
            if job is not None and job.get_status(refresh=False) in ENDED and rung is not None:
                is_due = is_due and not halving.waits_at_rung(self.places, member, job, rung)
            outcome = resume(member_id) if is_due else "finished"
            if outcome == "finished":
                raise Conflict(f"job: {member_id} has nothing left to do")
            return outcome

        return self.steer_sweep(sweep_id, RUNNING, resume_member)

    def close_sweep(self, sweep_id: str) -> tuple[SweepFolder, list[str]]:
        """End a sweep, so that nothing of it is queued; return its folder and its jobs."""
        folder = self._sweep(sweep_id)[0]
        with folder.changing():
            state = folder.update(phase=CANCELED)
        return folder, [member.id for member in state.members]

    @needs_redis
    def steer_sweep(self, sweep_id: str, phase: str, act: Callable[[str], str]) -> str:
        """Set the phase of a sweep, then act on each of its jobs that allows it.

        The phase comes first: the sweep's process queues nothing in between.
        """
        folder = self._sweep(sweep_id)[0]
        with folder.changing():
            submit_all(self.places, folder)
            state = folder.update(phase=phase)
            folder.set_active(phase == RUNNING)
        outcomes = []
        for member in state.members:
            with suppress(Conflict, NotFound):  # it has ended, or was removed
                outcomes.append(act(member.id))
        if not outcomes and phase != RUNNING:
            raise Conflict(f"sweep: no job of {sweep_id} runs or waits")
        return _summary(outcomes, len(state.members))


def _summary(outcomes: Sequence[str], total: int) -> str:
    """Return how many jobs had which outcome: `canceled 3, stopping 1 of 9 jobs`."""
    counts = {outcome: outcomes.count(outcome) for outcome in dict.fromkeys(outcomes)}
    words = ", ".join(f"{outcome} {number}" for outcome, number in counts.items())
    return f"{words or 'unchanged 0'} of {total} jobs"


def _training_spec(kind: str) -> type[TrainingSpec]:
    spec: type[Spec] = spec_class(kind)
    if not issubclass(spec, TrainingSpec):
        raise SpecError("sweep", f"must be of a kind that trains, got {kind}")
    return spec
