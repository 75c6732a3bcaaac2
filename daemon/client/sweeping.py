"""Submission of sweeps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import redis

from ...configs.config import ModelConfig
from ...configs.queues import TRAIN
from ...jobs import spec_class
from ...jobs.errors import SpecError
from ...jobs.ids import fresh_id
from ...jobs.spec import Spec
from ...jobs.training.options import TrainingSpec
from ..groups import driver, grid
from ..groups.folder import RUNNING, SWEEP
from ..groups.grid import SweepOptions
from ..groups.members import changes_of
from ..groups.sweep import Member, Search, State, Sweep, SweepFolder
from ..lifecycle.queueing import AT_ONCE, Queueing
from ..runs import weights
from ..runs.weights import Weights
from .capacity import check_deciding_daemon
from .connection import needs_redis
from .reader import Reader
from .submitting import Submitting


class Sweeping(Submitting, Reader):
    """Submits sweeps."""

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

        `values`: raw options of the kind. `given`: raw values of `grid.KEYS`. Raises SpecError and
        NotFound. Needs no Redis.
        """
        spec = _training_spec(kind)
        options = SweepOptions.parse(given, spec)
        seed = spec.options()["seed"].convert(values.get("seed", spec.options()["seed"].default))
        documents = self._documents(spec, {**values, "seed": seed}, options, init, model)
        base = documents[0][0]
        specs = [spec.parse(document["spec"]) for of_point in documents for document in of_point]
        steps = sorted({one.steps_total for one in specs if one.steps_total is not None})
        has_limit = any(one.time_limit is not None for one in specs)
        if has_limit and options.halving is not None:
            raise SpecError("halving", "must go with steps, got a time_limit")
        for name in ("halving", "search"):
            if getattr(options, name) is not None and len(steps) > 1:
                raise SpecError(name, f"must go with equal steps, got {steps[0]} and {steps[-1]}")
        search = self._search(options)
        points = [] if search else options.points
        metric = grid.metric_for(specs[0], options.metric)
        sweep = Sweep(
            id=fresh_id(SWEEP),
            kind=kind,
            created=round(time.time(), 3),
            origin="cli",
            name=queueing.name,
            tags=list(queueing.labels.tags),
            axes={name: list(found) for name, found in options.axes.items()},
            seeds=options.seeds,
            halving=options.halving,
            metric=metric,
            lower_is_better=grid.is_lower_better(spec, metric),
            rungs=[] if has_limit else grid.rungs_for(steps[-1], len(points), options.halving),
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
            first = self.check(spec.parse(grid.variant(values, point, 0)), init=init, model=model)
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
                driver.advance(self.places, SweepFolder(self.home, sweep.id))
        return sweep.id


def _training_spec(kind: str) -> type[TrainingSpec]:
    spec: type[Spec] = spec_class(kind)
    if not issubclass(spec, TrainingSpec):
        raise SpecError("sweep", f"must be of a kind that trains, got {kind}")
    return spec
