"""The plan of a sweep: its options and those that it varies, checked. Queues nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...configs.config import ModelConfig
from ...configs.queues import TRAIN
from ...jobs import spec_class
from ...jobs.errors import SpecError
from ...jobs.ids import fresh_id
from ...jobs.spec import Spec
from ...jobs.training.options import TrainingSpec
from ..groups import grid
from ..groups.folder import RUNNING, SWEEP
from ..groups.grid import SweepOptions
from ..groups.members import changes_of
from ..groups.sweep import Member, Search, State, Sweep
from ..lifecycle.queueing import AT_ONCE, Queueing
from ..runs.weights import Weights

if TYPE_CHECKING:
    from .jobs import Jobs


def plan(
    jobs: Jobs,
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
    documents = _documents(jobs, spec, {**values, "seed": seed}, options, init, model)
    base = documents[0][0]
    specs = [spec.parse(document["spec"]) for of_point in documents for document in of_point]
    steps = sorted({one.steps_total for one in specs if one.steps_total is not None})
    has_limit = any(one.time_limit is not None for one in specs)
    if has_limit and options.halving is not None:
        raise SpecError("halving", "must go with steps, got a time_limit")
    for name in ("halving", "search"):
        if getattr(options, name) is not None and len(steps) > 1:
            raise SpecError(name, f"must go with equal steps, got {steps[0]} and {steps[-1]}")
    search = _search(jobs, options)
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


def _search(jobs: Jobs, options: SweepOptions) -> Search | None:
    """The requested search; by default as many trials at once as this home has workers."""
    if options.search is None:
        return None
    workers = sum(worker.queue == TRAIN for worker in jobs.config.workers)
    return Search(
        sampler=options.search,
        trials=options.trials,
        parallel=min(options.parallel or max(workers, 1), options.trials),
        ranges=dict(options.ranges),
    )


def _documents(
    jobs: Jobs,
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
        first = jobs.check(spec.parse(grid.variant(values, point, 0)), init=init, model=model)
        of_point = [first]
        for number in range(1, options.seeds):
            changed = spec.parse({**first["spec"], "seed": first["spec"]["seed"] + number})
            of_point.append({**first, "spec": changed.to_json()})
        found.append(of_point)
    return found


def _training_spec(kind: str) -> type[TrainingSpec]:
    spec: type[Spec] = spec_class(kind)
    if not issubclass(spec, TrainingSpec):
        raise SpecError("sweep", f"must be of a kind that trains, got {kind}")
    return spec
