"""The model that a job has trained, by the job's id or name."""

from __future__ import annotations

from ...configs.config import ModelConfig
from ...jobs.errors import SpecError
from ..host.home import Home
from ..runs import labels
from ..runs.labels import Labels
from ..runs.rundir import is_job_id


def trained_by(home: Home, job: str) -> ModelConfig | None:
    """Return the model that a job, by id or name, has trained; None if there is none.

    Raises SpecError if several jobs with that name have one.
    """
    if is_job_id(job):
        ids = [job]
    else:
        ids = labels.fitting(home.runs, Labels(name=job)) if labels.is_name(job) else []
    folders = {job_id: home.runs / job_id / "model" for job_id in ids}
    found = [ModelConfig(name=j, path=str(path)) for j, path in folders.items() if path.is_dir()]
    if len(found) > 1:
        ids = [model.name for model in found[:3]]
        raise SpecError(
            "model", f"{job!r} is the name of {len(found)} trained jobs: {', '.join(ids)}"
        )
    return found[0] if found else None
