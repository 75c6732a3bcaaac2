"""Thousands of ended jobs, and everything that reads jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from desks import Desk
from gateways import Gateway

from warmd.daemon.client.client import Client
from warmd.daemon.gateway.core.metrics import Metrics
from warmd.daemon.gateway.core.models_index import ModelIndex
from warmd.daemon.queue import keys
from warmd.daemon.runs.rundir import RunDir
from warmd.daemon.supervise.retention import Retention
from warmd.jobs import spec_class

FEW = 3  # jobs in a short listing
WORKER = "infer-0:test:1"


def end(client: Client, number: int, origin: str = "http") -> list[str]:
    """Make ended answers, as quickly as they can be made."""
    spec, store = spec_class("infer").parse({"model": "tiny", "prompt": "a"}), client.store
    document = {"spec": spec.to_json(), "python_path": [], "origin": origin}
    ids = []
    for _ in range(number):
        rundir = RunDir.create(client.home.runs, "infer", document, durable=False)
        ids.append(rundir.path.name)
        store.enqueue(ids[-1], "infer", from_cli=origin == "cli")
        queue, taken = store.queue("infer").key, keys.taken(WORKER)
        popped: Any = client.connection.lmove(queue, taken, "LEFT", "RIGHT")
        begun = store.begin(popped, "infer", WORKER)
        assert begun is not None
        rundir.write_result({"choices": []}, revision=1)
        store.finish(begun[0], begun[1].claim, {"choices": []})
    return ids


def reads(desk: Desk | Gateway) -> dict[str, Callable[[], object]]:
    """All commands and requests that read jobs."""
    client = desk.client
    waiting = client.jobs(statuses=["queued"])[0]["id"]
    retention = Retention(
        client.store, desk.home, keep_s=86_400, most=10_000, most_bytes=10_000_000_000
    )
    metrics, index = Metrics(client), ModelIndex(client)
    retention.remove_due()  # new jobs are measured once
    return {
        "queue": lambda: client.jobs(statuses=("started", "queued", "scheduled", "deferred")),
        "status": lambda: (client.queues(), client.jobs(statuses=["started"])),
        "show": lambda: client.job(waiting),
        "the latest job": lambda: client.find(None),
        "the only job that runs": client.pending,
        "jobs --limit": lambda: client.jobs(limit=FEW),
        "/metrics": metrics.text,
        "/v1/models": index.all,
        "/v1/fine_tuning/jobs": lambda: client.trainings(20),
        "retention": retention.remove_due,
    }
