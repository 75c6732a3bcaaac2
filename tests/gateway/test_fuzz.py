"""Fuzz test of the gateway by its OpenAPI description: no request makes it fail."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx2 as httpx
import pytest
import schemathesis
from gateways import Answerer, Gateway
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
NOT_READY = 503  # of these routes, where no daemon runs
ASKS_DAEMON = ("/health", "/v1/warmd/models/load", "/v1/warmd/models/unload")
RERANK = ("/v1/rerank", "/v2/rerank")
EXAMPLES = 40  # for each route
TOKEN = "a-token-of-tests"


@pytest.fixture(scope="module")
def gateway(tiny_model: Path) -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        gateway = Gateway(Path(folder, "home"), tiny_model, scores=True)
        answerer = Answerer(gateway)
        answerer.start()
        yield gateway
        answerer.done.set()
        answerer.join(10)
        gateway.close()


def existing(gateway: Gateway) -> dict[str, str]:
    """Existing names, by path parameter; those of groups by their paths."""
    client = gateway.openai()
    job = client.fine_tuning.jobs.create(model="tiny", training_file="arithmetic")
    file = client.files.create(file=("a.jsonl", b"{}"), purpose="fine-tune")
    groups: dict[str, str] = {}
    options: dict[str, dict[str, Any]] = {
        "sweeps": {"array": 2},
        "curricula": {"stages": [{}], "gate": {}},
    }
    for path, further in options.items():
        body = {"model": "tiny", "training_file": "arithmetic", **further}
        url = f"{gateway.url}/v1/warmd/{path}"
        made = httpx.post(url, json=body, headers={"X-Warmd": "1"})
        assert made.status_code == 200, made.text
        groups[path] = made.json()["id"]
    return {
        "name": "tiny",
        "job_id": job.id,
        "other_id": job.id,
        "file_id": file.id,
        "checkpoint": f"{job.id}@1",
        "permission_id": "a",
        **groups,
    }


@pytest.mark.nightly(
    part="clients", catches="random requests (schemathesis) that end in a server error"
)
def test_no_request_makes_the_gateway_fail(gateway: Gateway) -> None:
    schema = schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")
    names = existing(gateway)
    operations = [cast(Any, found).ok() for found in schema.get_all_operations()]
    assert len(operations) > 15
    for operation in operations:
        if not operation.path.endswith("/stream"):  # which ends with the job, or never
            fuzz(operation, names)


def fuzz(operation: Any, names: dict[str, str]) -> None:
    """Send requests that the description of a route allows."""

    # Not with the pytest plugin, which generates its own tests.
    @given(case=operation.as_strategy())
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Any) -> None:
        if isinstance(body := case.body, dict):
            # Mostly existing names, to get past the 404.
            if isinstance(body.get("model"), str) and len(body["model"]) % 4:
                body["model"] = "scorer" if case.operation.path in RERANK else "tiny"
            if isinstance(body.get("training_file"), str) and len(body["training_file"]) % 2:
                body["training_file"] = "arithmetic"
        for name, value in case.path_parameters.items():
            if name != "action" and len(value) % 2:
                path = case.operation.path.split("/")[3] if name == "group_id" else name
                case.path_parameters[name] = names[path]
        response = case.call()
        if response.status_code != NOT_READY or case.operation.path not in ASKS_DAEMON:
            case.validate_response(response, checks=CHECKS)

    send()


# What all checks of schemathesis find, by code and begin of the operation, with the reason.
DEVIATIONS: dict[str, dict[str, str]] = {
    "ST202": {  # a request that the description allows is refused
        "": "values are checked beyond JSON Schema (files that exist, options that fit together), "
        "and 1.0 is not taken for an integer"
    },
    "ST201": {  # a request that the description does not allow is accepted
        "POST /v1/files": "a form has texts only: an object arrives as its text",
        "POST /v1/warmd/check": "a check reports an invalid job with status 200",
        "POST /v1/warmd/sweeps/check": "a check reports an invalid job with status 200",
    },
    "ST204": {  # a method that the description does not have, not refused with 405
        "POST /v1/warmd/": "a change without X-Warmd gets 403, before its route is looked for"
    },
    "ST105": {  # another content type
        f"GET /v1/warmd/{path}": "the HTTP parser refuses an address beyond 64 KiB, in plain text"
        for path in ("jobs", "runs")
    },
    "ST101": {  # a status of 5xx: no daemon runs
        f"{'GET' if path == '/health' else 'POST'} {path}": "503" for path in ASKS_DAEMON
    },
    "ST205": {  # Allow
        "OPTIONS /v1/warmd/sweeps/check": "GET is served: of a sweep with the id `check`",
        "OPTIONS /v1/warmd/curricula/check": "GET is served: of a curriculum with the id `check`",
        "OPTIONS /v1/warmd/models/": "GET is served: of a model with the name `load` or `unload`",
    },
}


@pytest.mark.nightly(
    part="clients", catches="methods, headers and statuses that the description does not have"
)
def test_the_gateway_does_what_its_description_says(make_gateway: Any, tmp_path: Path) -> None:
    """All checks of schemathesis, by its command: statuses, methods, Allow, headers, the token."""
    gateway = make_gateway(http_token=TOKEN)
    report = tmp_path / "report.json"
    command = "from schemathesis.cli import schemathesis; schemathesis()"
    done = subprocess.run(
        [
            *(sys.executable, "-c", command, "run", f"{gateway.url}/openapi.json"),
            *("--checks", "all", "--phases", "coverage,fuzzing", "--seed", "0"),
            *("--max-examples", str(EXAMPLES)),
            *("--continue-on-failure", "--no-shrink", "--no-color", "--exclude-path-regex"),
            *("stream$", "--header", f"Authorization: Bearer {TOKEN}"),
            *("--report", "json", "--report-json-path", str(report)),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert report.exists(), done.stderr
    found = json.loads(report.read_bytes())
    assert found["operations"]["tested"] > 50, done.stdout
    unknown = [
        (failure["code"], failure["title"], operation)
        for failure in found["failures"]
        for operation in failure["operations"]
        if not operation.startswith(tuple(DEVIATIONS.get(failure["code"], {})))
    ]
    assert not unknown, done.stdout[-20_000:]


def job(method: str, **options: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "training_file": "arithmetic",
        "seed": 1,
        "suffix": "a",
        "method": {"type": method, method: {"hyperparameters": options}},
    }


# Valid requests of the routes whose bodies are checked by warmd, not by their description alone.
SWEEP = {**job("reinforcement", samples=4), "seeds": 2, "halving": 3, "metric": "reward"}
GRADER = {
    **{"type": "text_similarity", "name": "a", "evaluation_metric": "fuzzy_match"},
    **{"input": "{{sample.output_text}}", "reference": "{{item.answer}}"},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/warmd/sweeps": {**SWEEP, "sweep": {"learning_rate": [1e-4, 1e-3]}, "name": "a"},
    "/v1/warmd/sweeps/check": {**SWEEP, "sweep": {"learning_rate": [1e-4, 1e-3]}, "tags": ["a"]},
    "/v1/warmd/curricula": {
        **job("reinforcement", samples=4),
        "stages": [{"name": "a", "hyperparameters": {"learning_rate": 1e-4}, "gate": True}],
        "gate": {"samples": 4, "max_tokens": 4},
    },
    "/v1/warmd/evaluations": {
        "model": "tiny",
        "options": {"samples": 4, "max_tokens": 4, "reward": ["correctness"]},
        "name": "a",
        "tags": ["b"],
    },
    "/v1/fine_tuning/alpha/graders/validate": {"grader": GRADER},
    "/v1/fine_tuning/alpha/graders/run": {
        "grader": GRADER,
        "model_sample": "3",
        "item": {"answer": "3"},
    },
    "/v1/warmd/check": job("reinforcement", samples=4, learning_rate=1e-4),
    "/v1/rerank": {
        **{"model": "scorer", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
        **{"return_documents": True, "truncation": True, "max_tokens_per_doc": 2},
        **{"rank_fields": ["text"], "relevant_spans": {"mode": "disabled"}, "priority": 0},
    },
    "/v1/fine_tuning/jobs": job("reinforcement", samples=4, reward=["correctness"]),
}
HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 0.5, 10**30, 1e308, "", "x" * 100_000, "\x00\ud800", "../../etc/passwd"),
    *([], [[]], [None] * 1000, {}, {"": None}, {"a": {"b": [{}]}}, ["os:system"]),
)


def mutated(value: Any) -> Iterator[Any]:
    """Yield copies of a JSON value with one part replaced by a hostile value, or left out."""
    yield from HOSTILE
    if isinstance(value, dict):
        for name, part in value.items():
            rest = {key: other for key, other in value.items() if key != name}
            yield rest
            yield from ({**rest, name: changed} for changed in mutated(part))
        yield {**value, "unknown": 1}
    elif isinstance(value, list):
        for place, part in enumerate(value):
            yield from ([*value[:place], changed, *value[place + 1 :]] for changed in mutated(part))


DAILY = ("/v1/fine_tuning/alpha/graders/validate", "/v1/rerank", "/v1/fine_tuning/jobs")
OTHERS = pytest.mark.nightly(
    part="clients", catches="a wrong part of a body that a route of warmd answers with a crash"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=() if path in DAILY else OTHERS) for path in BODIES]
)
def test_a_valid_request_with_one_wrong_part_is_refused_in_one_line_or_served(
    gateway: Gateway, path: str
) -> None:
    headers = {"X-Warmd": "1", "content-type": "application/json"}
    with httpx.Client(headers=headers, timeout=30) as client:
        for body in mutated(BODIES[path]):
            answer = client.post(gateway.url + path, content=json.dumps(body).encode())
            assert answer.status_code < 500, (answer.text[:500], str(body)[:500])
            if answer.status_code != 200:
                message = answer.json()["error"]["message"]
                assert len(message) < 1100, message[:200]
                assert "\n" not in message, message
