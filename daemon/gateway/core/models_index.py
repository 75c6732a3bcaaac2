"""Model index: the models that requests may name, warm or trained by finished jobs."""

from __future__ import annotations

from typing import Any

from ....jobs.context import step_of
from ....jobs.errors import NotFound
from ....jobs.ids import is_job_id
from ....jobs.models.adapters import is_model
from ...client.client import Client
from ...client.trained import is_job, trained_by
from ...host.home import Home
from ...host.warm_set import known_models, on_demand_models
from ...runs.checkpoints import Checkpoints
from ...runs.rundir import RunDir
from ..http.errors import ApiError
from ..http.hidden import without_paths

CHECKPOINT = "ftckpt-"  # begins the ids of checkpoints


class ModelIndex:
    """Looks up models by name. Every method reads files: call it in a thread."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._home: Home = client.home

    def known(self, name: str) -> str:
        """Return the name of a model for the options of a job: that of a warm one, JOB or JOB@STEP.

        Raises ApiError 404 for an unknown model, and SpecError for a name of several.
        """
        return str(self.found(name)["id"])

    def found(self, name: str) -> dict[str, Any]:
        """Return a model in OpenAI's shape. Raises as `known`.

        Besides warm models, `name` may be a job or a group as `trained_by` has it, or the id of a
        checkpoint. Folders and hub ids are not accepted: a client must not choose what is read from
        this machine's disk or downloaded.
        """
        if name in self._kept():
            return _shown(name, "warm", 0)
        try:
            found = self._trained(_without_prefix(name))
        except NotFound as error:
            raise _unknown(str(error)) from error
        if found is None and name in self._on_demand():
            return _shown(name, "warm", 0)
        if found is None:
            raise _unknown(f"model: no model {name[:80]!r}: see /v1/models")
        return found

    def _trained(self, name: str) -> dict[str, Any] | None:
        """Return the model of a job. Raises as `trained_by`."""
        if not is_job(name.partition("@")[0]):
            model = trained_by(self._client.config, name, of_http=True)
            if model is None:
                return None
            name = model.name
        job, at, step = name.partition("@")
        return self._at(job, step) if at else self._made_by(job)

    def all(self) -> list[dict[str, Any]]:
        """Return all models: warm ones first, then trained ones, newest first."""
        jobs = filter(is_job_id, self._client.jobs.trainings_not_given_up())
        made = [model for job_id in jobs if (model := self._made_by(job_id)) is not None]
        return [*(_shown(name, "warm", 0) for name in self._warm()), *made]

    def _warm(self) -> list[str]:
        return list(dict.fromkeys([*self._kept(), *self._on_demand()]))

    def _kept(self) -> list[str]:
        configured = [model.name for model in self._client.config.models]
        return [*known_models(self._home), *configured]

    def _on_demand(self) -> list[str]:
        return [name for name in on_demand_models(self._home) if not is_job_id(name)]

    def _made_by(self, job_id: str) -> dict[str, Any] | None:
        folder = self._home.runs / job_id / "model"
        if not is_model(folder) or RunDir(folder.parent).read_result() is None:
            return None
        return _shown(job_id, "warmd", int(folder.stat().st_mtime))

    def _at(self, job_id: str, step: str) -> dict[str, Any] | None:
        for path in Checkpoints(self._home.runs / job_id / "checkpoints").list():
            if step == str(step_of(path)) and is_model(path):
                return _shown(f"{job_id}@{step}", "warmd", int(path.stat().st_mtime))
        return None


def _shown(name: str, owner: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": owner}


def _without_prefix(name: str) -> str:
    """Return JOB@STEP for the id of a checkpoint, ftckpt-JOB-STEP; other names as they are."""
    job, _, step = name.removeprefix(CHECKPOINT).rpartition("-")
    return f"{job}@{step}" if name.startswith(CHECKPOINT) and is_job_id(job) else name


def _unknown(message: str) -> ApiError:
    return ApiError(404, without_paths(message), param="model", code="model_not_found")
