"""`/v1/warmd/runs`: trainings and evaluations with their options and metrics."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from gateways import Gateway

from warmd.daemon.gateway.api.runs import RunPage
from warmd.daemon.lifecycle.queueing import Queueing
from warmd.daemon.runs.events import EventLog
from warmd.jobs import spec_class

GRPO = {"model": "tiny", "num_generations": 2, "samples": 4}


@pytest.fixture(scope="module")
def gateway(tiny_model: Path) -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        made = Gateway(Path(folder, "home"), tiny_model)
        yield made
        made.close()


@pytest.fixture
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=20, trust_env=False) as client:
        yield client


def submit(gateway: Gateway, kind: str = "grpo", name: str | None = None, **options: Any) -> str:
    values = {**GRPO, **options} if kind == "grpo" else {"model": "tiny", **options}
    return gateway.client.jobs.submit(spec_class(kind).parse(values), Queueing(name=name))


def listed(http: httpx.Client, **params: Any) -> dict[str, Any]:
    reply = http.get("/v1/warmd/runs", params=params)
    assert reply.status_code == 200, reply.text
    RunPage.model_validate(reply.json(), extra="forbid")
    found: dict[str, Any] = reply.json()
    return found


def test_runs_are_trainings_and_evaluations_page_by_page(gateway, http):
    ids = [submit(gateway), submit(gateway, "eval"), submit(gateway)][::-1]
    request = submit(gateway, "infer", prompt="1")
    found: list[str] = []
    while True:
        page = listed(http, limit=2, **({"after": found[-1]} if found else {}))
        found += [run["id"] for run in page["data"]]
        if not page["has_more"]:
            break
    assert found[: len(ids)] == ids
    assert request not in found
    assert [run["id"] for run in listed(http, kind="eval")["data"]] == [ids[1]]
    several = listed(http, id=[ids[2], ids[0], ids[0]])["data"]
    assert {run["id"] for run in several} == {ids[0], ids[2]}


def test_a_run_has_its_changed_options_and_the_page_their_defaults(gateway, http):
    job_id = submit(gateway, name="first", learning_rate=1e-4)
    rundir = gateway.client.rundir(job_id)
    rundir.annotate(spec={**rundir.read_spec()["spec"], "template": "x" * 1000})
    page = listed(http, name="first")
    (run,) = page["data"]
    assert run["id"] == job_id
    assert run["options"]["learning_rate"] == 1e-4
    assert run["options"]["template"] == "x" * 200 + "…"
    assert "temperature" not in run["options"]
    assert page["defaults"]["grpo"]["temperature"] == 1.0
    assert not run["options"].keys() - page["defaults"]["grpo"].keys()


def test_metrics_are_the_last_and_best_values_and_continue_with_new_events(gateway, http):
    job_id = submit(gateway)
    path = gateway.client.rundir(job_id).events

    def metrics() -> dict[str, Any]:
        found: dict[str, Any] = listed(http, id=job_id)["data"][0]["metrics"]
        return found

    assert metrics() == {}
    with EventLog(path, execution=1) as log:
        log.emit("step", step=1, loss=0.5, reward=0.25, seconds=2.0)
        log.emit("step", step=2, loss=0.75, reward=0.125, seconds=3.0)
        log.emit("eval", step=2, reward=0.5, n=4, intervals={"reward": [0.25, 0.75]})
    assert metrics() == {
        "loss": {"last": 0.75, "best": 0.5},
        "reward": {"last": 0.125, "best": 0.25},
        "seconds": {"last": 3.0},
        "eval_reward": {"last": 0.5, "best": 0.5, "low": 0.25, "high": 0.75},
        "eval_n": {"last": 4.0},
    }
    with EventLog(path, execution=1) as log:
        log.emit("eval", step=4, reward=0.25, n=4)
    assert metrics()["eval_reward"] == {"last": 0.25, "best": 0.5}
    path.unlink()  # a job that starts over
    with EventLog(path, execution=2) as log:
        log.emit("step", step=1, loss=1.0)
    assert metrics() == {"loss": {"last": 1.0, "best": 1.0}}


def test_the_metric_of_an_evaluation_is_that_of_trainings(gateway, http):
    job_id = submit(gateway, "eval")
    with EventLog(gateway.client.rundir(job_id).events, execution=1) as log:
        log.emit("eval", n=8, reward=0.5, intervals={"reward": [0.2, 0.8]})
    found = listed(http, id=job_id)["data"][0]["metrics"]
    assert found["eval_reward"] == {"last": 0.5, "best": 0.5, "low": 0.2, "high": 0.8}


def test_groups_of_a_page_have_names(gateway, http):
    sweep_id = gateway.client.groups.submit_sweep(
        "grpo", GRPO, {"sweep": {"learning_rate": ["1e-5", "1e-4"]}}, Queueing(name="rates")
    )
    page = listed(http)
    assert page["groups"] == {sweep_id: "rates"}
    members = [run for run in page["data"] if run["sweep"] == sweep_id]
    assert {run["options"]["learning_rate"] for run in members} == {1e-5, 1e-4}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"kind": "infer"}, "kind: must be one of grpo, sft, "),
        ({"status": "done"}, "status: must be one of "),
        ({"id": "../x"}, "id: must be the id of a run, got '../x'"),
        ({"id": "infer-20260131-184200-x7f2"}, "id: must be the id of a run, got 'infer-2026"),
        ({"after": "x"}, "after: must be the id of a run, got 'x'"),
        ({"limit": 501}, "limit: "),
        ({"sort": "loss"}, "sort: unknown or not supported"),
    ],
)
def test_a_wrong_parameter_is_refused_by_its_name(http, params, message):
    reply = http.get("/v1/warmd/runs", params=params)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(message)
