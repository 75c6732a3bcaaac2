"""Thousands of ended and of waiting jobs, and everything that reads jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from desks import Desk
from gateways import Gateway

from warmd.configs.queues import INFER
from warmd.daemon.client.client import Client
from warmd.daemon.gateway.core.metrics import Metrics
from warmd.daemon.gateway.core.models_index import ModelIndex
from warmd.daemon.lifecycle.view import JobFilter
from warmd.daemon.queue import keys
from warmd.daemon.runs.rundir import RunDir
from warmd.daemon.supervise.retention import Retention
from warmd.jobs import spec_class

FEW = 3  # jobs in a short listing
WORKER = "infer-0:test:1"


def _create(client: Client, kind: str, origin: str) -> RunDir:
    """Queue a job, as quickly as one can be made."""
    values = {"model": "tiny", **({"prompt": "a"} if kind == "infer" else {})}
    spec = spec_class(kind).parse(values)
    document = {"spec": spec.to_json(), "python_path": [], "origin": origin}
    rundir = RunDir.create(client.home.runs, kind, document, durable=False)
    client.store.enqueue(rundir.path.name, spec.queue, from_cli=origin == "cli")
    return rundir


def wait(client: Client, number: int, kind: str = "infer", origin: str = "http") -> list[str]:
    """Make jobs that wait in the queue."""
    return [_create(client, kind, origin).path.name for _ in range(number)]


def end(client: Client, number: int, kind: str = "infer", origin: str = "http") -> list[str]:
    """Make ended jobs: answers that have finished, or trainings that have failed.

    Each is taken from the end of its queue, so that other jobs may wait there.
    """
    store, queue = client.store, spec_class(kind).queue
    worker = f"{queue}-0:test:1"
    ids = []
    for _ in range(number):
        rundir = _create(client, kind, origin)
        ids.append(rundir.path.name)
        waiting, taken = store.queue(queue).key, keys.taken(worker)
        popped: Any = client.connection.lmove(waiting, taken, "RIGHT", "RIGHT")
        begun = store.begin(popped, queue, worker)
        assert begun is not None
        if queue == INFER:
            rundir.write_result({"choices": []}, revision=1)
            store.finish(begun[0], begun[1].claim)
        else:
            store.fail(begun[0], begun[1].claim, "no reason")
    return ids


def reads(desk: Desk | Gateway) -> dict[str, Callable[[], object]]:
    """All commands and requests that read jobs."""
    client = desk.client
    waiting = client.jobs.all(JobFilter(statuses=["queued"]))[0]["id"]
    retention = Retention(client.places, keep_s=86_400, most=10_000, most_bytes=10_000_000_000)
    metrics, index = Metrics(client), ModelIndex(client)
    retention.remove_due()  # new jobs are measured once
    return {
        "queue": lambda: client.jobs.all(
            JobFilter(statuses=("started", "queued", "scheduled", "deferred"))
        ),
        "status": lambda: (client.jobs.queues(), client.jobs.all(JobFilter(statuses=["started"]))),
        "show": lambda: client.jobs.get(waiting),
        "the latest job": lambda: client.find(None),
        "the only job that runs": client.jobs.pending,
        "jobs --limit --all": lambda: client.jobs.all(JobFilter(limit=FEW)),
        "jobs --limit": lambda: client.jobs.all(JobFilter(limit=FEW, kinds=("grpo", "eval"))),
        "/metrics": metrics.text,
        "/v1/models": index.all,
        "/v1/fine_tuning/jobs": lambda: client.jobs.trainings(20),
        "retention": retention.remove_due,
    }
