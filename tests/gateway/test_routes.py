"""The gateway as a whole: its process, token, origin check, health, metrics and models."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import httpx2 as httpx
import openai
import pytest
from gateway_requests import TOKEN, metrics, refusal, request

from warmd.configs.config import DaemonConfig
from warmd.daemon.gateway.api.files import UploadRoute
from warmd.daemon.gateway.app import _ROUTERS, create_app
from warmd.daemon.gateway.http.browser import CHANGING, READING
from warmd.daemon.gateway.http.strict import StrictRoute, accepted
from warmd.daemon.gateway.page import routes as page


@pytest.mark.slow
def test_the_documented_query_parameters_are_those_that_are_accepted(tmp_path):
    documented = create_app(DaemonConfig(home=tmp_path), "unix:///nowhere").openapi()["paths"]
    routers = [router for router in _ROUTERS if router is not page.router]
    routes: list[Any] = [route for router in routers for route in router.routes]
    assert len(routes) > 60
    for route in routes:
        if not route.include_in_schema or isinstance(route, UploadRoute):
            continue
        assert isinstance(route, StrictRoute)
        for method in route.methods or ():
            assert method in READING + CHANGING  # others are not checked, and get 405
            shown = documented[route.path][method.lower()]
            names = {one["name"] for one in shown.get("parameters", []) if one["in"] == "query"}
            known, model = accepted(route.endpoint, route.path)
            assert set(known) == names
            assert (model is not None) == ("requestBody" in shown)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("warmd/jobs?limit=1&limit=5", "limit: must be given once"),
        ("warmd/runs?name=a&name=b", "name: must be given once"),
        ("warmd/jobs?limit=1_0", "limit: must be an integer, got '1_0'"),
        ("warmd/sweeps?limit=%2B5", "limit: must be an integer, got '+5'"),
        ("fine_tuning/jobs?limit=5.0", "limit: must be an integer, got '5.0'"),
        ("warmd/jobs?limit=%205", "limit: must be an integer, got ' 5'"),
        ("warmd/jobs?limit=05", "limit: must be an integer, got '05'"),
        ("files?limit=", "limit: must be an integer, got ''"),
        ("files?page=1", "page: unknown or not supported"),
        ("models?limit=1", "limit: unknown or not supported"),
        ("warmd/overview?names=a", "names: unknown or not supported"),
        ("files?after=file-0", "after: must be an id of this list, got 'file-0'"),
    ],
)
def test_query_parameters_are_known_single_and_written_as_in_json(gateway, path, problem):
    answer = httpx.get(f"{gateway.url}/v1/{path}")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == problem


def test_lists_may_be_given_by_repetition(gateway):
    answer = httpx.get(f"{gateway.url}/v1/warmd/jobs?kind=grpo&kind=sft&limit=10")
    assert answer.status_code == 200


@pytest.mark.slow
def test_gateway_imports_neither_torch_nor_transformers():
    code = (
        "import sys, warmd.daemon.gateway.__main__, warmd.jobs.infer.kind, warmd.jobs.encode.kind, "
        "warmd.jobs.grpo.kind, warmd.jobs.mlm.kind\n"
        "print(sorted({'torch', 'transformers', 'trl', 'datasets'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_gateway_reports_why_it_cannot_listen(gateway, make_gateway):
    port = int(gateway.url.rpartition(":")[2])
    other = make_gateway(http_port=port)
    assert f"127.0.0.1:{port}" in other.said["problem"]
    assert other.process.wait(10) == 1


@pytest.mark.slow
def test_token_is_required_if_set(make_gateway):
    gateway = make_gateway(http_token=TOKEN)
    for key in ("wrong", f"{TOKEN}x"):
        with pytest.raises(openai.AuthenticationError) as caught:
            gateway.openai(api_key=key).models.list()
        assert refusal(caught.value)[1]["code"] == "invalid_api_key"
    assert gateway.openai(api_key=TOKEN).models.list().data[0].id == "tiny"
    assert httpx.get(f"{gateway.url}/metrics").status_code == 401
    assert httpx.get(f"{gateway.url}/health").status_code == 503


@pytest.mark.slow
def test_gateway_listens_on_other_addresses_only_with_a_token(make_gateway):
    assert "http_token: must be set" in make_gateway(http_host="0.0.0.0").said["problem"]
    assert make_gateway(http_host="0.0.0.0", http_token=TOKEN).said["url"]


def test_health_has_the_reason_when_no_worker_is_ready(gateway):
    answer = httpx.get(f"{gateway.url}/health")
    assert answer.status_code == 503
    assert "no daemon runs" in answer.json()["error"]["message"]


def test_metrics_count_requests_tokens_and_jobs(gateway, background):
    before = metrics(gateway)
    answer = background.submit(request, gateway)
    gateway.take().finish("x")
    answer.result(10)
    after = metrics(gateway)
    route = 'warmd_http_requests_total{route="/v1/completions",status="200"}'
    finished = 'warmd_jobs{queue="infer",status="finished"}'
    tokens = 'warmd_http_tokens_total{type="completion"}'
    grown = {name: after[name] - before.get(name, 0) for name in (route, finished, tokens)}
    assert grown == {route: 1, finished: 1, tokens: 2}


def test_models_are_the_warm_ones(gateway):
    assert [model.id for model in gateway.openai().models.list()] == ["tiny"]
    assert gateway.openai().models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        gateway.openai().models.retrieve("nope")
    assert refusal(caught.value)[1]["code"] == "model_not_found"
