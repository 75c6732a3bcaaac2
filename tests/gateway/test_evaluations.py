"""`/v1/warmd/evaluations` and the differences of two jobs over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import orjson
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
        ({"against": "../x"}, 400, "against: must be an evaluation, by id or name, got '../x'"),
        (
            {"against": ABSENT},
            400,
            f"against: must be an evaluation, by id or name, got '{ABSENT}'",
        ),
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


def test_an_evaluation_gets_its_name_and_tags(gateway, http):
    status, job = ask(http, name="base", tags=["a"], options={"samples": 4})
    assert (status, job["name"], job["tags"]) == (200, "base", ["a"])
    for field, value in (("name", "no name"), ("tags", ["no tag"])):
        status, said = ask(http, **{field: value})
        assert status == 400
        assert said["error"]["message"].startswith(f"{field}: must be 1 to 6")


def answered(gateway: Gateway, scores: list[float | None], text: str) -> str:
    """Make an evaluation with a score for each question; None: it has none."""
    job_id = gateway.client.jobs.submit(spec_class("eval").parse({"model": "tiny"}))
    rows = [
        {
            **{"row": number, "question": str(number), "weights": None, "prompt": f"{number}+1="},
            "answer": str(number + 1),
            "completions": [{"text": f"{text} {number}", "scores": {"reward": score}}],
            "metrics": {} if score is None else {"reward": score},
        }
        for number, score in enumerate(scores, start=1)
    ]
    path = gateway.client.rundir(job_id).path / "rows.jsonl"
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return job_id


def test_questions_are_paired_with_those_of_another_evaluation(gateway, http):
    one = answered(gateway, [1.0, 0.0, 1.0, None], "first")
    other = answered(gateway, [0.0, 1.0, 1.0, 1.0, 1.0], "second")

    def questions(job_id: str = one, **params: Any) -> Any:
        return http.get(f"/v1/warmd/evaluations/{job_id}/questions", params=params).json()

    alone = questions(limit=2, offset=2)
    assert [found["row"]["row"] for found in alone["data"]] == [3, 4]
    assert (alone["total"], alone["comparison"], alone["data"][0]["other"]) == (4, None, None)
    both = questions(against=other)
    assert [found["difference"] for found in both["data"]] == [1.0, -1.0, 0.0, None]
    assert (both["better"], both["worse"]) == (1, 1)
    assert both["comparison"]["reward"]["n"] == 3
    assert both["data"][0]["other"]["completions"][0]["text"] == "second 1"
    worse = questions(against=other, only="worse")
    assert ([found["row"]["row"] for found in worse["data"]], worse["total"]) == ([2], 1)
    assert questions(text="first 3")["total"] == 1
    assert questions(text="second 3", against=other)["total"] == 1
    assert questions(text="second 3")["total"] == 0


def test_questions_are_refused_for_other_jobs(gateway, http):
    training = gateway.client.jobs.submit(spec_class("grpo").parse({"model": "tiny"}))
    one = answered(gateway, [1.0], "a")
    for job_id, params, status, message in (
        (training, {}, 400, f"job_id: must be the id of an evaluation, got {training}"),
        (one, {"against": training}, 400, "against: must be the id of an evaluation, got grpo-"),
        (ABSENT, {}, 404, f"job: no job '{ABSENT}'"),
        (one, {"only": "equal"}, 400, "only: "),
    ):
        reply = http.get(f"/v1/warmd/evaluations/{job_id}/questions", params=params)
        assert reply.status_code == status
        assert reply.json()["error"]["message"].startswith(message)
