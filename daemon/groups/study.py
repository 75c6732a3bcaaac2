"""The trials of a search as a study of Optuna: which values to try next, and a file for its tools.

The state of the sweep is the truth; a study is made from it whenever it is needed, so there is
nothing that could disagree after a crash.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...jobs.errors import Conflict
from .sweep import Search, State, Sweep

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

FILE = "optuna.log"  # in the folder of the sweep: a journal, which optuna-dashboard opens


def ask(
    sweep: Sweep, search: Search, state: State, scores: Mapping[int, float | None], number: int
) -> list[dict[str, Any]]:
    """Return the values of further trials, chosen by the tree-structured Parzen estimator.

    `scores`: of the trials that have ended, by point; None if one failed. The choice depends on
    them and on the seed of the sweep alone. Source: Bergstra et al. 2011 (NeurIPS), as Optuna's
    `TPESampler` has it; trials that still run count as bad ones, so that others differ from them.
    """
    optuna = _optuna()
    seed = (sweep.document["spec"]["seed"] + len(state.points)) % 2**32
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    study = optuna.create_study(direction=_direction(sweep), sampler=sampler)
    axes = _distributions(sweep, search)
    study.add_trials(_trials(axes, state, scores))
    found = []
    for _ in range(number):
        values = study.ask(axes).params
        ranges = search.ranges
        found.append({k: ranges[k].rounded(v) if k in ranges else v for k, v in values.items()})
    return found


def write(
    path: Path, sweep: Sweep, search: Search, state: State, scores: Mapping[int, float | None]
) -> None:
    """Replace the file of the study, whose name is the sweep's id."""
    optuna = _optuna()
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    lock = JournalFileOpenLock(str(new))
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(new), lock_obj=lock)),
        study_name=sweep.id,
        direction=_direction(sweep),
    )
    study.add_trials(_trials(_distributions(sweep, search), state, scores))
    os.replace(new, path)


def _direction(sweep: Sweep) -> str:
    return "minimize" if sweep.lower_is_better else "maximize"


def _distributions(sweep: Sweep, search: Search) -> dict[str, BaseDistribution]:
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    found: dict[str, BaseDistribution] = {
        name: CategoricalDistribution(values) for name, values in sweep.axes.items()
    }
    for name, one in search.ranges.items():
        if one.is_integer:
            found[name] = IntDistribution(int(one.low), int(one.high), log=one.log)
        else:
            found[name] = FloatDistribution(one.low, one.high, log=one.log)
    return found


def _trials(
    axes: Mapping[str, BaseDistribution], state: State, scores: Mapping[int, float | None]
) -> Sequence[optuna.trial.FrozenTrial]:
    """The points as trials: complete, failed or running."""
    optuna = _optuna()
    found = []
    for index, values in enumerate(state.points):
        status = optuna.trial.TrialState.RUNNING
        if index in scores:
            is_failed = scores[index] is None
            states = optuna.trial.TrialState
            status = states.FAIL if is_failed else states.COMPLETE
        found.append(
            optuna.trial.create_trial(
                params=values, distributions=dict(axes), value=scores.get(index), state=status
            )
        )
    return found


def _optuna() -> Any:
    """Import Optuna. Raises Conflict without it."""
    try:
        import optuna
    except ImportError as error:
        raise Conflict("search: needs Optuna: pip install 'warmd[optuna]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
