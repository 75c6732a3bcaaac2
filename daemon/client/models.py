"""The models of a client: the known names, and the weights that jobs have made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...jobs import KINDS, spec_class
from ...jobs.errors import SpecError
from ..host.warm_set import known_models
from ..runs import weights
from ..runs.weights import Weights
from .trained import group_of, job_of_group

if TYPE_CHECKING:
    from .connection import Connection


class Models:
    """The models of a client's home."""

    def __init__(self, client: Connection) -> None:
        self._client = client

    def weights(self, text: str, kind: str | None = None) -> Weights:
        """Return the verified weights of `JOB` (its final model) or `JOB@STEP`. Needs no Redis.

        JOB may be a sweep or a curriculum, as in `trained_by`. `-` is the latest training; with
        `kind`, that of the job that starts from them, the latest one of the same type of model.
        Raises SpecError, NotFound and CheckpointDamaged.
        """
        job, at, step = text.partition("@")
        if job == "-" and kind is not None:
            job = self._client.lookup.latest(_kinds_like(kind))
        rundir = self._client.rundir(self.training(job))
        if not at:
            self.fetch_weights(rundir.path.name, final=True)
            return weights.final_model(rundir)
        if not (step.isascii() and step.isdigit()):
            raise SpecError("init_from", f"must be JOB or JOB@STEP, got {text[:80]!r}")
        self.fetch_weights(rundir.path.name, int(step))
        return weights.checkpoint(rundir, int(step))

    def training(self, text: str) -> str:
        """Return the id of a job by id, unique prefix or name; of a group, that of its model.

        `-` is the latest training. Raises SpecError and NotFound.
        """
        if (group := group_of(self._client.home, text)) is not None:
            return job_of_group(self._client.config, group)
        return self._client.find(text, is_training=True)

    def fetch_weights(self, job_id: str, step: int | None = None, *, final: bool = False) -> None:
        """Make weights of a job whole on this machine, if a run store has them.

        `final`: those of its final model; else of the checkpoint of a step, or of the latest. If
        the run store cannot be reached, a model or a step that is here is taken as it is.
        """
        remote, readable = self._client.remote, self._client.readable
        if remote is None or readable is None:
            return
        if final:
            readable.fetch_model(job_id)
        elif step is not None:
            readable.fetch_checkpoint(job_id, step)
        else:
            remote.fetch_checkpoint(job_id, None)

    def names(self) -> list[str]:
        """Return the names of the configured and the loaded models. Needs no Redis."""
        return list(
            {m.name: m for m in self._client.config.models} | known_models(self._client.home)
        )


def _kinds_like(kind: str) -> list[str]:
    """Return the kinds that train the same type of model."""
    from ...jobs.training.options import TrainingSpec  # has the options of every training

    trained = {
        name: spec.trains for name in KINDS if issubclass(spec := spec_class(name), TrainingSpec)
    }
    return [name for name, sort in trained.items() if sort == trained.get(kind)]
