"""Submission: the only way to a new job.

`write` makes the run directory, complete; `enqueue` publishes it to the run store, if there is one,
and adds the job to its queue. Killed in between, a process leaves a directory that the next start
adopts as it was submitted (adopt.py), or, without its weights, one that nothing adopts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis

from ...configs.config import ModelConfig
from ...configs.queues import TRAIN
from ...jobs import spec_class
from ...jobs.ids import kind_of
from ..runs import labels, source, weights
from ..runs.git import GitState
from ..runs.rundir import RunDir
from ..runs.weights import Weights
from ..store.bucket import StoreUnavailable
from . import adopt
from .places import Places
from .queueing import AT_ONCE, Queueing


def submit(
    places: Places,
    kind: str,
    document: Mapping[str, Any],
    queueing: Queueing = AT_ONCE,
    *,
    init: Weights | None = None,
    git_state: Callable[[], GitState | None] | None = None,
) -> str:
    """Queue a new job; return its id. If that fails or is interrupted, nothing of it is left.

    `document`: the checked content of its spec.json. `init`: the weights to start from.
    `git_state`: where the caller has begun to read the state of the folder it is submitted from.
    """
    document = _whole(places, document, queueing)
    rundir = RunDir.create(places.runs, kind, _at_first(document, init))
    try:
        document = _fill(rundir, document, queueing, init, git_state)
        enqueue(places, rundir.path.name, document)
    except BaseException as error:  # also Ctrl-C
        _take_back(places, rundir, error)
        raise
    return rundir.path.name


def submit_as(
    places: Places,
    job_id: str,
    document: Mapping[str, Any],
    queueing: Queueing = AT_ONCE,
    *,
    init: Weights | None = None,
    from_cli: bool | None = None,
) -> None:
    """Queue a job under an id that was chosen before, once: a repeated call finds it in Redis.

    The caller prevents two calls at the same time. Arguments as for `submit` and `enqueue`.
    """
    if places.store.fetch(job_id) is not None:
        return
    document = _whole(places, document, queueing)
    rundir = RunDir.ensure(places.runs, job_id, _at_first(document, init))
    document = _fill(rundir, document, queueing, init, None)
    enqueue(places, job_id, document, from_cli=from_cli)


def write(places: Places, kind: str, document: Mapping[str, Any]) -> tuple[RunDir, dict[str, Any]]:
    """Write the run directory of a job that its caller flushes and queues; return its spec.json.

    Raises SpecError if it cannot be written.
    """
    whole = _whole(places, document, AT_ONCE)
    return RunDir.create(places.runs, kind, whole, durable=False), whole


def enqueue(
    places: Places, job_id: str, document: Mapping[str, Any], *, from_cli: bool | None = None
) -> None:
    """Publish a run directory and add its job to its queue, as its spec.json asks.

    `document`: that spec.json. `from_cli`: whether commands without a job id consider the job; by
    default those that were submitted from the command line.
    """
    asked = adopt.asked_of(document)
    places.publish(job_id)
    places.store.enqueue(
        job_id,
        spec_class(kind_of(job_id)).queue,
        front=asked.front,
        after=asked.after,
        at=asked.at,
        retries=asked.retries,
        timeout_s=asked.timeout_s,
        from_cli=document.get("origin") == "cli" if from_cli is None else from_cli,
        needs=adopt.needs_of(document),
    )


def _whole(places: Places, document: Mapping[str, Any], queueing: Queueing) -> dict[str, Any]:
    """The content of spec.json with all that is needed to queue the job."""
    needs = {"needs": dict(queueing.needs)} if queueing.needs else {}
    asked = {k: value for k, value in queueing.to_json().items() if k != "needs"}
    return {**document, **needs, adopt.QUEUEING: {**places.own, **asked}}


def _at_first(document: dict[str, Any], init: Weights | None) -> dict[str, Any]:
    """What is written before the weights are linked: nothing adopts a job without `queueing`."""
    if init is None:
        return document
    return {name: value for name, value in document.items() if name != adopt.QUEUEING}


def _fill(
    rundir: RunDir,
    document: dict[str, Any],
    queueing: Queueing,
    init: Weights | None,
    git_state: Callable[[], GitState | None] | None,
) -> dict[str, Any]:
    """Add all other files to a run directory; return its spec.json."""
    labels.write(rundir, queueing.labels)
    if spec_class(kind_of(rundir.path.name)).queue == TRAIN:
        for folder in document["python_path"]:
            source.record_submission(rundir, document["spec"], Path(folder), git_state)
    if init is None:
        return document
    own = rundir.path / "init"
    shutil.rmtree(own, ignore_errors=True)  # of a process that was killed
    weights.link(init, own)
    # The model needs a unique name: the zygote identifies models by name, and several jobs may
    # start from the same checkpoint.
    model = ModelConfig(name=f"{rundir.path.name}:init", path=str(own)).__dict__
    rundir.annotate(model=model, **{adopt.QUEUEING: document[adopt.QUEUEING]})
    return {**document, "model": model}


def _take_back(places: Places, rundir: RunDir, error: BaseException) -> None:
    """Remove a job whose submission failed or was interrupted; Redis may have it already."""
    job_id = rundir.path.name
    with suppress(redis.RedisError):
        job = places.store.fetch(job_id)
        if job is not None and not places.store.cancel_waiting(job):
            places.store.request_stop(job, "kill")  # a worker has taken it
            return
        if job is not None:
            places.store.remove(job)
    if places.remote is not None and not isinstance(error, StoreUnavailable):
        with suppress(StoreUnavailable):
            places.remote.withdraw(job_id)
    rundir.remove()
