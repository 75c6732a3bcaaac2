"""The plan of a sweep: the options that vary, their values, the seeds, and the metric."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ...jobs.errors import SpecError
from ...jobs.spec import OptionInfo
from ...jobs.training.options import TrainingSpec
from .ranges import Range

MOST_MEMBERS = 1000
_MOST_VALUES = 100  # of one option
_LEAST_ETA, _MOST_ETA = 2, 16

# The keys of a job file that describe a sweep; on the command line they are options of `submit`.
KEYS = ("sweep", "seeds", "array", "halving", "search", "trials", "parallel", "metric")

SAMPLERS = ("optuna",)  # modules

INDEX = "{index}"  # in text options of an array: the number of the job, from 0


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The options that a sweep varies, and how its points are compared."""

    axes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # option -> its values
    seeds: int = 1  # jobs per point
    array: int | None = None  # number of jobs of an array, which has no axes
    halving: int | None = None  # the share 1/N of points is kept at each rung; None: all of them
    search: str | None = None  # how the values of trials are chosen; None: all combinations
    trials: int = 20  # of a search
    parallel: int | None = None  # trials of a search at once; None: as there are workers
    ranges: Mapping[str, Range] = field(default_factory=dict)  # of a search: option -> numbers
    metric: str | None = None  # None: the default of the kind

    @classmethod
    def parse(cls, given: Mapping[str, Any], spec: type[TrainingSpec]) -> Self:
        """Check raw values of `KEYS` for jobs of a kind. Raises SpecError."""
        for name in given:
            if name not in KEYS:
                raise SpecError(str(name), f"must be one of {', '.join(KEYS)}")
        options = cls(
            seeds=_number("seeds", given.get("seeds"), 1, MOST_MEMBERS) or 1,
            array=_number("array", given.get("array"), 1, MOST_MEMBERS),
            halving=_number("halving", given.get("halving"), _LEAST_ETA, _MOST_ETA),
            search=_text("search", given.get("search")),
            trials=_number("trials", given.get("trials"), 1, MOST_MEMBERS) or cls.trials,
            parallel=_number("parallel", given.get("parallel"), 1, MOST_MEMBERS),
            metric=_text("metric", given.get("metric")),
        )
        axes, ranges = _axes(given.get("sweep"), spec.options())
        options = replace(options, axes=axes, ranges=ranges)
        options._check(spec)
        for name in ("trials", "parallel"):
            if options.search is None and given.get(name) is not None:
                raise SpecError(name, "must go with search, got it alone")
        return options

    def _check(self, spec: type[TrainingSpec]) -> None:
        if self.array is not None:
            for name in ("axes", "ranges", "halving", "search"):
                if getattr(self, name):
                    option = "sweep" if name in ("axes", "ranges") else name
                    raise SpecError("array", f"must not be given together with {option}")
            if self.seeds > 1:
                raise SpecError("array", "must not be given together with seeds: each job has one")
        self._check_search()
        if self.seeds > 1 and "seed" in (*self.axes, *self.ranges):
            raise SpecError("seeds", "must not be given together with a sweep of seed")
        points = math.prod(map(len, self.axes.values())) * (self.array or 1)
        count = self.seeds * (self.trials if self.search else points)
        if count > MOST_MEMBERS:
            raise SpecError("sweep", f"must make at most {MOST_MEMBERS} jobs, got {count}")
        if self.metric not in (None, *spec.judged_by):
            names = ", ".join(spec.judged_by)
            raise SpecError("metric", f"must be one of {names}, got {str(self.metric)[:80]!r}")
        if self.halving is not None and not self.axes:
            raise SpecError("halving", "must go with sweep, got it alone")

    def _check_search(self) -> None:
        if self.search is None and self.ranges:
            name, one = next(iter(self.ranges.items()))
            raise SpecError("sweep", f"must go with search for a range, got {name}={one.text}")
        if self.search is None:
            return
        if self.search not in SAMPLERS:
            names = ", ".join(SAMPLERS)
            raise SpecError("search", f"must be one of {names}, got {self.search[:80]!r}")
        if not self.axes and not self.ranges:
            raise SpecError("search", "must go with sweep, got it alone")
        if self.halving is not None:
            raise SpecError("search", "must not be given together with halving")
        if importlib.util.find_spec(self.search) is None:
            raise SpecError("search", "needs Optuna: pip install 'warmd[optuna]'")

    @property
    def points(self) -> list[dict[str, Any]]:
        """The combinations of values, the last option varying fastest.

        For a search: combinations that cover each value and each end of a range once.
        """
        if self.search is not None:
            ends = {name: (one.low, one.high) for name, one in self.ranges.items()}
            axes = {**self.axes, **ends}
            longest = max(map(len, axes.values()))
            return [{k: v[min(i, len(v) - 1)] for k, v in axes.items()} for i in range(longest)]
        if self.array is not None:
            return [{"index": index} for index in range(self.array)]
        names = list(self.axes)
        return [dict(zip(names, v, strict=True)) for v in itertools.product(*self.axes.values())]


def is_lower_better(spec: type[TrainingSpec], metric: str) -> bool:
    """Whether a metric is to be minimized."""
    return metric.removeprefix("eval_") in spec.lower_is_better or metric in spec.lower_is_better


def metric_for(spec: TrainingSpec, metric: str | None) -> str:
    """Return the metric that points are compared by. Raises SpecError if it is not measured."""
    measured, of_steps = spec.compared_by
    if metric is None:
        return measured if spec.is_measured else of_steps
    if metric.startswith("eval_") and not spec.is_measured:
        raise SpecError(
            "metric", f"must go with held-out data (such as eval_samples), got {metric} alone"
        )
    return metric


def rungs_for(steps: int, points: int, eta: int | None) -> list[int]:
    """Return the steps at which points are compared, the last one being all `steps`.

    Successive halving (Jamieson & Talwalkar 2016, arXiv:1502.07943): at each rung the best 1/eta of
    the points continue, for eta times as many steps. Raises SpecError for too few points or steps.
    """
    if eta is None:
        return [steps]
    rounds = 0
    while eta ** (rounds + 1) <= points:
        rounds += 1
    if rounds == 0:
        raise SpecError("halving", f"must be at most the number of points ({points}), got {eta}")
    rungs = [steps // eta ** (rounds - k) for k in range(rounds + 1)]
    if rungs[0] < 1:
        raise SpecError("steps", f"must be at least {eta**rounds} for these rungs, got {steps}")
    return rungs


def variant(options: Mapping[str, Any], point: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the options of one job: those of the sweep with the values of a point.

    `number`: of the job among those of the point. It, or the index in an array, is added to the
    seed.
    """
    changed = {**options, **{name: value for name, value in point.items() if name != "index"}}
    if "index" in point:
        number = point["index"]
        changed = {name: _indexed(value, number) for name, value in changed.items()}
    if number:
        changed["seed"] = changed["seed"] + number
    return changed


def _indexed(value: Any, index: int) -> Any:
    if isinstance(value, list):
        return [_indexed(item, index) for item in value]
    return value.replace(INDEX, str(index)) if isinstance(value, str) else value


def _axes(
    given: Any, known: Mapping[str, OptionInfo]
) -> tuple[dict[str, tuple[Any, ...]], dict[str, Range]]:
    """Read `{option: [values]}`, or texts such as `learning_rate=1e-6,1e-5`. Raises SpecError.

    Returns the options with their values, and those with a range.
    """
    found: dict[str, tuple[Any, ...]] = {}
    ranges: dict[str, Range] = {}
    for raw, values in _pairs(given):
        name = raw.strip().replace("-", "_")
        if name not in known:
            raise SpecError("sweep", f"must be of options of the kind, got {raw[:80]!r}")
        if name in found or name in ranges:
            raise SpecError("sweep", f"must have {name} once, got it twice")
        if known[name].many or name in ("steps", "model"):
            raise SpecError("sweep", f"must be of options with one value each, got {name}")
        if len(values) == 1 and (one := Range.parse(known[name], values[0])) is not None:
            ranges[name] = one
            continue
        found[name] = tuple(known[name].convert(value) for value in values)
        if not 1 <= len(values) <= _MOST_VALUES or len(set(found[name])) < len(values):
            raise SpecError("sweep", f"must have 1 to {_MOST_VALUES} different values of {name}")
    return found, ranges


def _pairs(given: Any) -> Iterable[tuple[str, Sequence[Any]]]:
    if given is None:
        return
    if isinstance(given, Mapping):
        for name, values in given.items():
            yield str(name), values if isinstance(values, list | tuple) else [values]
        return
    for text in given if isinstance(given, list | tuple) else [given]:
        name, equals, values = str(text).partition("=")
        if not equals:
            raise SpecError("sweep", f"must be OPTION=VALUE,VALUE, got {str(text)[:80]!r}")
        yield name, [value.strip() for value in values.split(",")]


def _number(name: str, value: Any, least: int, most: int) -> int | None:
    if value is None:
        return None
    text = str(value)
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
    if number is None or isinstance(value, bool) or not least <= number <= most:
        raise SpecError(name, f"must be an integer from {least} to {most}, got {text[:80]!r}")
    return number


def _text(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise SpecError(name, f"must be text, got {str(value)[:80]!r}")
    return value
