"""Names of jobs, sweeps and models in requests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from gateway_requests import OURS
from gateways import Gateway

from warmd.daemon.lifecycle.queueing import Queueing
from warmd.jobs import spec_class
from warmd.jobs.context import checkpoint_name

INFER = {"prompt": "1", "max_tokens": 1}
TRAINING = {"model": "tiny", "samples": 4, "num_generations": 2}


@pytest.fixture
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=20, trust_env=False, headers=OURS) as client:
        yield client


@pytest.fixture
def train(gateway: Gateway) -> Iterator[Any]:
    """Trains a job with a name; all are removed at the end."""
    made = []

    def train(name: str, *, has_model: bool = True) -> str:
        spec = spec_class("grpo").parse(TRAINING)
        job_id = gateway.client.jobs.submit(spec, Queueing(name=name))
        run = gateway.take("train")
        assert run.job.id == job_id
        made.append(job_id)
        if has_model:
            source = gateway.config.models[0].path
            shutil.copytree(source, run.rundir.path / "model")
            shutil.copytree(source, run.rundir.path / "checkpoints" / checkpoint_name(2))
        run.finish()
        return job_id

    yield train
    gateway.drop_waiting()
    for job_id in made:
        gateway.client.jobs.remove(job_id)


def asked(gateway: Gateway, http: httpx.Client, model: str) -> str:
    """The model of the job that a completion queues."""
    with http.stream("POST", "/v1/completions", json={"model": model, "stream": True, **INFER}):
        return str(gateway.take().spec["model"])


def test_a_model_is_named_by_a_job_its_checkpoint_or_the_latest(gateway, http, train):
    job_id = train("first")
    for text, name in (
        ("tiny", "tiny"),
        ("first", job_id),
        ("first@2", f"{job_id}@2"),
        ("-", job_id),
        ("-@2", f"{job_id}@2"),
        (f"ftckpt-{job_id}-2", f"{job_id}@2"),
    ):
        assert http.get(f"/v1/models/{text}").json()["id"] == name
        assert asked(gateway, http, text) == name
    assert http.get("/v1/warmd/models/first").json()["name"] == job_id


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_every_route_with_a_model_takes_a_name_and_refuses_that_of_several(
    gateway, http, train, background, path, body
):
    job_id = train("first")
    sent = background.submit(http.post, path, json={"model": "first", **body})
    run = gateway.take()
    assert run.spec["model"] == job_id
    run.fail("enough")
    sent.result()
    rerank = {"model": "first", "query": "a", "documents": ["b"]}
    assert http.post("/v1/rerank", json=rerank).json()["error"]["param"] == "model"  # no scores
    ids = [train("first"), job_id]
    refused = http.post(path, json={"model": "first", **body})
    message = f"model: 'first' is the name of 2 trained jobs: {', '.join(ids)}"
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, message)
    assert refused.json()["error"]["param"] == "model"


def test_trainings_and_evaluations_take_names_and_store_ids(gateway, http, train):
    job_id = train("first")
    body: dict[str, Any] = {"model": "first", "training_file": "arithmetic", "suffix": "second"}
    reinforcement = {"hyperparameters": {"samples": 4, "num_generations": 2}}
    body["method"] = {"type": "reinforcement", "reinforcement": reinforcement}
    made = http.post("/v1/fine_tuning/jobs", json=body).json()
    assert made["model"] == job_id
    assert http.get("/v1/fine_tuning/jobs/second").json()["id"] == made["id"]
    assert http.get("/v1/fine_tuning/jobs/-").json()["id"] == made["id"]
    assert http.post("/v1/fine_tuning/jobs/second/cancel").json()["status"] == "cancelled"
    one = http.post("/v1/warmd/evaluations", json={"model": "first", "name": "before"}).json()
    assert one["model"] == job_id
    two = http.post("/v1/warmd/evaluations", json={"model": "first", "against": "before"}).json()
    assert gateway.client.rundir(two["id"]).read_spec()["spec"]["against"] == one["id"]
    stages = [{"hyperparameters": {"samples": 4}}, {"gate": False}]
    curriculum = http.post(
        "/v1/warmd/curricula", json={**body, "suffix": None, "stages": stages, "name": "staged"}
    ).json()
    assert http.get("/v1/warmd/curricula/staged").json()["id"] == curriculum["id"]
    sent = http.post("/v1/warmd/curricula/-/cancel", json={})
    assert sent.json()["id"] == curriculum["id"]


def test_a_training_without_a_model_is_named_in_the_refusal(http, train):
    job_id = train("bare", has_model=False)
    refused = http.post("/v1/completions", json={"model": "bare", **INFER})
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    assert job_id in refused.json()["error"]["message"]


@pytest.mark.parametrize("text", ["nobody", "../x", "/etc", "a b", "x" * 65, "", "org/model", "--"])
def test_a_name_of_no_model_is_refused(http, text):
    refused = http.post("/v1/completions", json={"model": text, **INFER})
    assert refused.status_code in (400, 404)
    assert refused.json()["error"]["param"] == "model"


@pytest.mark.parametrize("name", ["tiny", "a@5", "grpo-20261121-184200-x7f2"])
def test_a_name_that_means_something_else_is_refused(http, name):
    body = {"training_file": "arithmetic", **{"model": "tiny", "suffix": name}}
    refused = http.post("/v1/fine_tuning/jobs", json=body)
    assert refused.json()["error"]["message"].startswith("suffix: must be another word than")
    refused = http.post("/v1/warmd/evaluations", json={"model": "tiny", "name": name})
    assert refused.json()["error"]["message"].startswith("name: must be another word than")


def test_a_job_in_a_path_is_named_by_its_name(http, train):
    ids = [train("rates/1"), train("other")]
    for text, job_id in (("rates%2F1", ids[0]), ("other", ids[1]), ("-", ids[1])):
        assert http.get(f"/v1/warmd/jobs/{text}").json()["job"]["id"] == job_id
        assert http.get(f"/v1/warmd/jobs/{text}/events").status_code == 200
        assert http.get(f"/v1/warmd/jobs/{text}/checkpoints").json()["data"][0]["step"] == 2
    assert http.get("/v1/warmd/jobs/rates%2f1/diff/other").json()["data"] == [
        *http.get(f"/v1/warmd/jobs/{ids[0]}/diff/{ids[1]}").json()["data"]
    ]
    assert http.get("/v1/models/rates%2F1").json()["id"] == ids[0]
    twice = train("other")
    refused = http.post("/v1/warmd/jobs/other/remove", json={})
    message = f"job: 'other' is the name of 2 jobs: {twice}, {ids[1]}"
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, message)
    for text in ("nobody", "grpo", "..%2F..%2Fetc", "*", "other*"):
        assert http.get(f"/v1/warmd/jobs/{text}").status_code == 404
