"""The model of a job, a sweep or a curriculum, by id or name; `-` is that of the latest training.

NAME@STEP is the model of a checkpoint. Reads run directories and groups, and no Redis.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from ...configs.config import DaemonConfig, ModelConfig
from ...configs.queues import TRAIN
from ...jobs import KINDS, spec_class
from ...jobs.context import checkpoint_name, step_of
from ...jobs.errors import Conflict, NotFound, SpecError
from ...jobs.ids import by_time, is_job_id, kind_of
from ..groups.folder import SWEEP, is_group_id
from ..host.home import Home
from ..host.warm_set import known_models, on_demand_models
from ..lifecycle.statuses import PENDING
from ..runs import labels, weights
from ..runs.checkpoints import Checkpoints
from ..runs.rundir import RunDir, job_ids
from .group_names import named_groups

if TYPE_CHECKING:
    from ..store.remote import RemoteRuns

LATEST = "-"
_LONGEST_STEP = 18  # digits; a longer name of a folder cannot be looked up


class FetchReport(Protocol):
    """Receives the progress of a model that is fetched from the run store."""

    def begin(self, job_id: str, total_bytes: int) -> None:
        """A model begins to be fetched."""

    def advance(self, number: int) -> None:
        """`num_bytes` more bytes have arrived."""


def is_checkpoint(text: str) -> bool:
    """Whether the name of a model has the form JOB@STEP."""
    job, _, step = text.partition("@")
    is_step = step.isascii() and step.isdigit() and len(step) <= _LONGEST_STEP
    return is_step and (job == LATEST or is_job_id(job) or labels.is_name(job))


def is_job(text: str) -> bool:
    """Whether the text is the id of a job, and not of a group: both have the same form."""
    return is_job_id(text) and not is_group_id(text)


def is_explicit(text: str) -> bool:
    """Whether the name of a model can only be that of a job or a group: `-`, an id, JOB@STEP."""
    return text == LATEST or is_job_id(text) or is_checkpoint(text)


def check_name(config: DaemonConfig, name: str | None) -> None:
    """Raise SpecError for the name of a new job or group that would mean something else.

    That is JOB@STEP, or the name of a loaded or configured model. Ids are refused by `Labels`.
    """
    if name is None:
        return
    if is_checkpoint(name):
        raise SpecError("name", f"must be another word than JOB@STEP, got {name!r}")
    home = Home(config.home)
    known = {model.name for model in config.models}
    if name in known | known_models(home).keys() | on_demand_models(home).keys():
        raise SpecError("name", f"must be another word than the name of a model, got {name!r}")


def trained_by(
    config: DaemonConfig,
    text: str,
    report: FetchReport | None = None,
    *,
    of_http: bool = False,
) -> ModelConfig | None:
    """Return the model that JOB, by id or name, has trained, or JOB@STEP; None if there is none.

    A sweep is its best job, a curriculum the latest that passed a gate, and `-` the latest training
    of the command line. The name of the model has the job's id.

    With a run store it is fetched, if it is not on this machine as the store has it. `of_http`: for
    an HTTP request: trainings of requests count for `-`, too, and nothing is fetched. Raises
    SpecError if the name is that of several, NotFound for a step that a job has no checkpoint of
    and for a training or a group without a model, Conflict, and StoreUnavailable.
    """
    home = Home(config.home)
    job, at, step = text.partition("@") if is_checkpoint(text) else (text, "", "")
    remote = None if of_http else _remote(config)
    ids = [job] if is_job(job) else _meant(config, remote, job, of_http=of_http)
    if remote is not None:
        for job_id in ids:
            if at:
                remote.fetch_checkpoint(job_id, int(step))
            else:
                _fetch(remote, job_id, report)
    folder = checkpoint_name(int(step)) if at else ""
    folders = {
        f"{job_id}{at}{step}": home.runs / job_id / ("checkpoints" if at else "model") / folder
        for job_id in ids
    }
    found = [
        ModelConfig(name=name, path=str(path)) for name, path in folders.items() if path.is_dir()
    ]
    if at and len(ids) == 1 and not found:
        steps = map(step_of, Checkpoints(home.runs / ids[0] / "checkpoints").list())
        listed = ", ".join(map(str, steps)) or "it has none"
        raise NotFound(f"model: must be a checkpoint of {ids[0]} ({listed}), got step {step}")
    if len(found) > 1:
        raise labels.ambiguous("model", job, [model.name for model in found], "trained jobs")
    if ids and not found and not is_job(job):
        if len(ids) > 1:
            raise labels.ambiguous("model", job, ids, "trainings without a final model")
        weights.final_model(RunDir(home.runs / ids[0]))  # raises NotFound, with its checkpoints
    return found[0] if found else None


def group_of(home: Home, text: str) -> str | None:
    """Return the group that an id or a name means as a model; None: no group.

    Raises SpecError if other groups, or trained jobs, have the name too.
    """
    if is_group_id(text):
        return text
    groups = named_groups(home, text)
    if not groups:
        return None
    jobs = [one for one in _named(home, text) if (home.runs / one / "model").is_dir()]
    if len(groups) + len(jobs) > 1:
        raise labels.ambiguous("model", text, [*groups, *jobs], "sweeps, curricula or trained jobs")
    return groups[0]


def job_of_group(config: DaemonConfig, group_id: str) -> str:
    """Return the job whose model is that of a group.

    It is the best job of an ended sweep, or the latest of a curriculum that passed a gate. Raises
    NotFound, Conflict, and SpecError for a sweep that has not ended.
    """
    home = Home(config.home)
    if kind_of(group_id) == SWEEP:
        return _best_of(_table(home, group_id, _remote(config)))
    from ..groups.curriculum import CurriculumFolder

    folder = CurriculumFolder.open(home, group_id)
    passed = folder.state().begin_of(len(folder.read().stages))
    if passed is None:
        raise NotFound(f"model: no stage of {group_id} has passed its gate yet")
    return passed


def _table(home: Home, sweep_id: str, remote: RemoteRuns | None) -> dict[str, Any]:
    """Return a sweep with its points, by the files of its jobs."""
    from ..groups.sweep import SweepFolder
    from ..lifecycle.find import Offline
    from . import sweep_views

    folder = SweepFolder.open(home, sweep_id)
    sweep, state = folder.read(), folder.state()
    is_active = folder.is_active  # read before the jobs, so that jobs queued meanwhile are seen
    if remote is not None:
        for job_id in state.jobs:
            with suppress(NotFound):  # it was removed
                remote.refresh(job_id)
    jobs = {job.id: job.to_json() for job in Offline(home.runs).several(state.jobs)}
    return sweep_views.table_of(is_active, sweep, state, jobs, home.runs)


def _best_of(sweep: Mapping[str, Any]) -> str:
    """Return the job with the best score of a sweep's best combination."""
    if sweep["best"] is None:
        raise NotFound(f"model: {sweep['id']} has no job with a score ({sweep['metric']}) yet")
    scored = [job for job in sweep["points"][sweep["best"]]["jobs"] if job["score"] is not None]
    sign = 1 if sweep["lower_is_better"] else -1
    best: str = min(scored, key=lambda job: sign * job["score"])["id"]
    if sweep["paused"] or sweep["status"] in PENDING:
        raise SpecError("model", f"must be of an ended sweep, or its best job so far, {best}")
    return best


def _meant(
    config: DaemonConfig, remote: RemoteRuns | None, text: str, *, of_http: bool
) -> list[str]:
    """Return the trainings that `-`, a name or the id of a group means."""
    home = Home(config.home)
    if text == LATEST:
        return [_latest(home, remote, of_http=of_http)]
    if not labels.is_name(text):
        return []
    if (group := group_of(home, text)) is not None:
        return [job_of_group(config, group)]
    jobs = _named(home, text)
    if remote is not None and not jobs and "/" not in text:
        # With a slash it is a hub id, or a sweep's job of this home.
        remote.refresh_summaries(remote.ids())
        jobs = _named(home, text)
    return jobs


def _latest(home: Home, remote: RemoteRuns | None, *, of_http: bool) -> str:
    """Return the latest training. Raises NotFound."""
    if remote is not None:
        remote.refresh_summaries(remote.ids())
    origins = ("cli", "http") if of_http else ("cli",)
    for job_id in sorted(_trainings(home), key=by_time, reverse=True):
        with suppress(Conflict, NotFound):  # its spec.json cannot be read, or it was removed
            if RunDir(home.runs / job_id).origin() in origins:
                return job_id
    raise NotFound(f"model: `-` is the latest training, and {home.runs} has none yet")


def _named(home: Home, name: str) -> list[str]:
    """Return the trainings with a name, newest first."""
    found = [one for one in _trainings(home) if labels.read(RunDir(home.runs / one)).name == name]
    return sorted(found, key=by_time, reverse=True)


def _trainings(home: Home) -> list[str]:
    """Return the jobs that may have trained a model: not the answers, of which there are most."""
    return [one for one in job_ids(home.runs) if _is_training(kind_of(one))]


@cache
def _is_training(kind: str) -> bool:
    return kind not in KINDS or spec_class(kind).queue == TRAIN


def _remote(config: DaemonConfig) -> RemoteRuns | None:
    if config.run_store is None:
        return None
    from ..store.remote import RemoteRuns

    return RemoteRuns(Home(config.home), config.run_store)


def _fetch(remote: RemoteRuns, job_id: str, report: FetchReport | None) -> None:
    if report is None:
        remote.fetch_model(job_id)
        return
    remote.fetch_model(
        job_id, on_begin=lambda _, total: report.begin(job_id, total), on_bytes=report.advance
    )
