"""The model that a job has trained, by the job's id or name; JOB@STEP is that of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ...configs.config import DaemonConfig, ModelConfig
from ...jobs.context import checkpoint_name, step_of
from ...jobs.errors import NotFound, SpecError
from ...jobs.ids import is_job_id
from ..host.home import Home
from ..runs import labels
from ..runs.checkpoints import Checkpoints
from ..runs.labels import Labels

if TYPE_CHECKING:
    from ..store.remote import RemoteRuns

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
    return is_step and (is_job_id(job) or labels.is_name(job))


def trained_by(
    config: DaemonConfig, text: str, report: FetchReport | None = None
) -> ModelConfig | None:
    """Return the model that JOB, by id or name, has trained, or JOB@STEP; None if there is none.

    With a run store it is fetched, if it is not on this machine as the store has it. Raises
    SpecError if several jobs with that name have one, NotFound for a step that a job has no
    checkpoint of, and StoreUnavailable.
    """
    home = Home(config.home)
    job, at, step = text.partition("@") if is_checkpoint(text) else (text, "", "")
    ids = [job] if is_job_id(job) else _named(home, job)
    if config.run_store is not None and (ids or labels.is_name(job)):
        from ..store.remote import RemoteRuns

        remote = RemoteRuns(home, config.run_store)
        if not ids and "/" not in job:  # with one it is a hub id, or a sweep's job of this home
            remote.refresh_summaries(remote.ids())
            ids = _named(home, job)
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
        ids = [model.name for model in found[:3]]
        raise SpecError(
            "model", f"{job!r} is the name of {len(found)} trained jobs: {', '.join(ids)}"
        )
    return found[0] if found else None


def _named(home: Home, name: str) -> list[str]:
    return labels.fitting(home.runs, Labels(name=name)) if labels.is_name(name) else []


def _fetch(remote: RemoteRuns, job_id: str, report: FetchReport | None) -> None:
    if report is None:
        remote.fetch_model(job_id)
        return
    remote.fetch_model(
        job_id, on_begin=lambda _, total: report.begin(job_id, total), on_bytes=report.advance
    )
