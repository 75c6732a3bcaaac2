"""The gateway as a whole: its process, token, origin check, health, metrics and models."""

from __future__ import annotations

import subprocess
import sys

import httpx2 as httpx
import openai
import pytest
from gateway_requests import TOKEN, metrics, refusal, request

from warmd.configs.config import DaemonConfig
from warmd.daemon.gateway.app import _ROUTERS, create_app
from warmd.daemon.gateway.http.browser import CHANGING, READING
from warmd.daemon.gateway.http.strict import StrictRoute, accepted


@pytest.mark.slow
def test_the_documented_query_parameters_are_those_that_are_accepted(tmp_path):
    documented = create_app(DaemonConfig(home=tmp_path), "unix:///nowhere").openapi()["paths"]
    strict = [route for router in _ROUTERS for route in router.routes if type(route) is StrictRoute]
    assert len(strict) > 40
    for route in strict:
        for method in route.methods or ():
            assert method in READING + CHANGING  # others are not checked, and get 405
            shown = documented[route.path][method.lower()]
            names = {one["name"] for one in shown.get("parameters", []) if one["in"] == "query"}
            known, model = accepted(route.endpoint, route.path)
            assert known == names
            assert (model is not None) == ("requestBody" in shown)


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
