"""Requests that browsers send for web pages: only the gateway's own pages may send any."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2 as httpx
import pytest
from gateway_requests import OURS, PUBLIC, TOKEN
from gateways import TLS, Gateway
from starlette.routing import Route

from warmd.daemon.gateway.app import _ROUTERS
from warmd.jobs import spec_class

OTHER_PORT = "http://localhost:9977"
FORM = {"sec-fetch-mode": "no-cors"}
LINK = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
# What a browser sends for a page of another port, of another host, and what an old one sends.
OTHER_PAGES = (
    {"origin": OTHER_PORT, "sec-fetch-site": "same-site", **FORM},
    {"origin": "https://evil.example", "sec-fetch-site": "cross-site", **FORM},
    {"sec-fetch-site": "same-site", **LINK},
    {"sec-fetch-site": "cross-site"},
    {"origin": OTHER_PORT},
)


def status(url: str, headers: dict[str, str], method: str = "GET") -> int:
    reply = httpx.request(method, url, headers=headers, timeout=20, verify=TLS)
    return reply.status_code


def routes() -> list[tuple[str, str]]:
    """Method and path of each route, with names as the values of its parameters."""
    found = [("GET", "/openapi.json")]
    for route in (route for router in _ROUTERS for route in router.routes):
        assert isinstance(route, Route)
        path = route.path.replace("{", "").replace("}", "").replace(":path", "")
        found += [(method, path) for method in route.methods or ()]
    assert len(found) > 60
    return found


@pytest.mark.parametrize(
    "page",
    [OTHER_PAGES[0], *(pytest.param(page, marks=pytest.mark.slow) for page in OTHER_PAGES[1:])],
    ids=str,
)
def test_no_route_takes_a_request_of_another_page(gateway, locked, page):
    bearer = {"authorization": f"Bearer {TOKEN}"}  # a page of another origin cannot send it
    for method, path in routes():
        if (method, path, page.get("sec-fetch-mode")) != ("GET", "/", "navigate"):
            assert status(gateway.url + path, {**OURS, **page}, method) == 403, (method, path)
            assert status(locked.url + path, {**bearer, **page}, method) == 403, (method, path)


@pytest.fixture
def job_id(gateway: Gateway) -> Iterator[str]:
    """A waiting training."""
    spec = spec_class("grpo").parse({"model": "tiny", "num_generations": 2})
    job_id = gateway.client.jobs.submit(spec)
    yield job_id
    gateway.client.jobs.cancel(job_id)


@pytest.mark.parametrize("page", OTHER_PAGES, ids=str)
def test_another_page_neither_uploads_a_file_nor_cancels_a_job(gateway, job_id, page):
    file, purpose = {"file": ("other.jsonl", b'{"a": 1}\n')}, {"purpose": "fine-tune"}
    upload = httpx.post(f"{gateway.url}/v1/files", headers=page, data=purpose, files=file)
    assert upload.status_code == 403
    assert "other.jsonl" not in httpx.get(f"{gateway.url}/v1/files").text
    assert status(f"{gateway.url}/v1/fine_tuning/jobs/{job_id}/cancel", page, "POST") == 403
    assert gateway.status(job_id) == "queued"


@pytest.mark.parametrize("site", ["same-site", "cross-site", "none"])
def test_links_lead_to_the_dashboard_and_addresses_may_be_typed(gateway, locked, site):
    for url in (gateway.url, locked.url):
        assert status(f"{url}/", {"sec-fetch-site": site, **LINK}) == 200
        assert status(f"{url}/", {"sec-fetch-site": site, **LINK}, "POST") == 403
    expected = 200 if site == "none" else 403
    assert status(f"{gateway.url}/v1/models", {"sec-fetch-site": site, **LINK}) == expected


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example@127.0.0.1"},
        {"host": "127.0.0.1:1@evil.example"},
        {"host": "evil.example", "origin": "http://evil.example"},  # DNS rebinding
        {"origin": "http://evil.example@127.0.0.1"},
        {"origin": "https://127.0.0.1:9999", "host": "127.0.0.1:9999"},
        {"origin": "http://127.0.0.1"},
        {"origin": "http://127.0.0.1:9999", "host": "localhost:9999"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://["},
    ],
    ids=str,
)
def test_a_page_of_another_host_scheme_or_port_is_refused_without_a_token(gateway, headers):
    assert status(f"{gateway.url}/v1/models", headers) == 403


@pytest.mark.parametrize("host", ["127.0.0.1:9999", "localhost:9999", "[::1]:9999", "LOCALHOST"])
def test_a_tunnel_to_another_port_works(gateway, host):
    page = {"host": host, "origin": f"http://{host.lower()}", "sec-fetch-site": "same-origin"}
    unload = f"{gateway.url}/v1/warmd/models/unload"
    json = {**OURS, **page, "content-type": "application/json"}
    assert httpx.post(unload, json={"name": "tiny"}, headers=json).status_code == 503  # no daemon


@pytest.mark.parametrize(
    ("host", "origin", "expected"),
    [
        ("warmd.test", PUBLIC, 401),
        ("warmd.test:443", PUBLIC, 401),
        ("127.0.0.1:8421", PUBLIC, 401),  # a proxy that sends its own Host
        ("127.0.0.1:9999", "http://127.0.0.1:9999", 401),  # a tunnel
        ("warmd.test", "http://warmd.test", 403),  # unencrypted: anyone's on the way
        ("warmd.test", f"{PUBLIC}:8443", 403),
        ("127.0.0.1:8421", "https://127.0.0.1:8421", 403),
    ],
)
def test_behind_a_proxy_the_origin_is_that_of_the_setting(locked, host, origin, expected):
    headers = {"host": host, "origin": origin, "sec-fetch-site": "same-origin"}
    assert status(f"{locked.url}/v1/files", headers, "POST") == expected


def test_what_a_request_says_about_a_proxy_is_not_believed(locked):
    said = {
        "x-forwarded-proto": "https",
        "x-forwarded-host": "evil.example",
        "forwarded": "host=evil.example;proto=https",
        "x-forwarded-for": "10.9.9.9",
    }
    page = {**said, "host": "127.0.0.1:9999"}
    for origin in ("https://evil.example", "https://127.0.0.1:9999"):
        assert status(f"{locked.url}/v1/files", {**page, "origin": origin}, "POST") == 403
    bearer = {"authorization": f"Bearer {TOKEN}"}
    moved = httpx.get(f"{locked.url}/v1/models/", headers={**page, **bearer})
    assert moved.headers["location"] == "http://127.0.0.1:9999/v1/models"


def test_the_refusal_says_what_to_set(locked):
    headers = {"host": "127.0.0.1:8421", "origin": "https://other.example"}
    refused = httpx.get(f"{locked.url}/v1/models", headers=headers).json()["error"]["message"]
    assert refused == (
        f"Origin: must be http://127.0.0.1:8421 or {PUBLIC}, got 'https://other.example': "
        "for a proxy, set http_origin"
    )


def test_only_files_of_the_page_may_run_as_scripts(gateway, locked):
    for url in (
        f"{gateway.url}/v1/models",
        f"{locked.url}/v1/models",
        f"{gateway.url}/page/app.js",
    ):
        assert httpx.get(url).headers["x-content-type-options"] == "nosniff"
