"""Model index: the models that requests may name, warm or trained by finished jobs."""

from __future__ import annotations

from typing import Any

from ....jobs.context import step_of
from ....jobs.ids import is_job_id
from ....jobs.models.adapters import is_model
from ...client.client import Client
from ...host.home import Home
from ...host.warm_set import known_models, on_demand_models
from ...runs.checkpoints import Checkpoints
from ...runs.rundir import RunDir
from ..http.errors import ApiError


class ModelIndex:
    """Looks up models by name. Every method reads files: call it in a thread."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._home: Home = client.home

    def check(self, name: str) -> None:
        """Raise ApiError 404 for an unknown model.

        Folders and hub ids are not accepted as names: a client must not choose what is read from
        this machine's disk or downloaded.
        """
        if self.find(name) is None:
            raise ApiError(
                404,
                f"model: no model {name[:80]!r}: see /v1/models",
                param="model",
                code="model_not_found",
            )

    def find(self, name: str) -> dict[str, Any] | None:
        """Return a model in OpenAI's shape, or None. JOB@STEP is the model of a checkpoint."""
        if name in self._warm():
            return _shown(name, "warm", 0)
        job, at, step = name.partition("@")
        if not is_job_id(job):
            return None
        return self._at(job, step) if at else self._made_by(job)

    def all(self) -> list[dict[str, Any]]:
        """Return all models: warm ones first, then trained ones, newest first."""
        jobs = filter(is_job_id, self._client.jobs.trainings_not_given_up())
        made = [model for job_id in jobs if (model := self._made_by(job_id)) is not None]
        return [*(_shown(name, "warm", 0) for name in self._warm()), *made]

    def _warm(self) -> list[str]:
        configured = [model.name for model in self._client.config.models]
        on_demand = (name for name in on_demand_models(self._home) if not is_job_id(name))
        return list(dict.fromkeys([*known_models(self._home), *configured, *on_demand]))

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
