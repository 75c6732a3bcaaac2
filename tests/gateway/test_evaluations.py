"""`/v1/warmd/evaluations` and the differences of two jobs over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from daemons import Daemon
from gateway_requests import OURS
from gateways import Gateway
from waiting import wait_until

from warmd.jobs import spec_class

ABSENT = "eval-20260131-184200-x7f2"


@pytest.fixture
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=20, trust_env=False, headers=OURS) as client:
        yield client


def ask(http: httpx.Client, **body: Any) -> tuple[int, Any]:
    reply = http.post("/v1/warmd/evaluations", json={"model": "tiny", **body})
    return reply.status_code, reply.json()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "/etc"}, 404, "model: no model '/etc': see /v1/models"),
        ({"options": {"dataset": "/etc/passwd"}}, 400, "options.dataset: must be the id of an "),
        ({"options": {"examples_dataset": "x.jsonl"}}, 400, "options.examples_dataset: not an op"),
        ({"options": {"reward": "evil:run"}}, 400, "options.reward: must be one of "),
        ({"options": {"samples": 0}}, 400, "options.samples: must be "),
        ({"options": {"model": "tiny"}}, 400, "options.model: must be the field model of the re"),
        ({"options": {"nope": 1}}, 400, "options.nope: not an option of eval over HTTP"),
        ({"against": "../x"}, 400, "against: must be the id of an evaluation, got '../x'"),
        ({"against": ABSENT}, 400, f"against: must be the id of an evaluation, got '{ABSENT}'"),
        ({"temperature": 1}, 400, "temperature: unknown or not supported"),
    ],
)
def test_a_wrong_evaluation_is_refused_by_its_field_and_nothing_is_queued(
    gateway, http, body, status, message
):
    before = gateway.client.jobs.all()
    refused, said = ask(http, **body)
    assert refused == status, said
    assert said["error"]["message"].startswith(message)
    assert gateway.client.jobs.all() == before


def test_a_retry_with_a_key_is_the_same_evaluation(gateway, http):
    body = {"model": "tiny", "options": {"samples": 4}}
    headers = {"idempotency-key": "one"}
    jobs = [http.post("/v1/warmd/evaluations", json=body, headers=headers).json() for _ in range(2)]
    assert jobs[0]["id"] == jobs[1]["id"]
    assert gateway.client.rundir(jobs[0]["id"]).read_spec()["origin"] == "http"


def test_differences_are_those_of_warmd_diff(gateway, http):
    values = {"model": "tiny", "num_generations": 2, "samples": 4}
    ids = [
        gateway.client.jobs.submit(spec_class("grpo").parse({**values, "learning_rate": rate}))
        for rate in (1e-5, 1e-4)
    ]
    found = http.get(f"/v1/warmd/jobs/{ids[0]}/diff/{ids[1]}").json()
    expected = {"section": "options", "name": "learning_rate", "one": 1e-5, "other": 1e-4}
    assert found == {"data": [expected]}
    assert http.get(f"/v1/warmd/jobs/{ids[0]}/diff/..%2fx").status_code == 404


@pytest.mark.slow
def test_the_second_evaluation_is_compared_with_the_first(shared_daemon: Daemon):
    url = wait_until(lambda: shared_daemon.status()["http"]["url"])
    with httpx.Client(base_url=url, timeout=20, trust_env=False, headers=OURS) as http:

        def ended(job_id: str) -> Any:
            job = http.get(f"/v1/warmd/jobs/{job_id}").json()["job"]
            return job if job["status"] == "finished" else None

        options = {"samples": 4, "max_tokens": 2}
        _, first = ask(http, options=options)
        wait_until(lambda: ended(first["id"]))
        _, second = ask(http, options=options, against=first["id"])
        result = wait_until(lambda: ended(second["id"]))["result"]
        assert result["against"] == first["id"]
        assert result["comparison"]["reward"]["n"] == 4
        assert "words" in result["comparison"]["reward"]
