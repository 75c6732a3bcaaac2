"""Sessions of the dashboard: both halves are needed, and tickets work once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from gateway_requests import OURS, PUBLIC, TOKEN
from gateways import Gateway

from warmd.daemon.gateway.http import session, tickets
from warmd.daemon.gateway.http.session import Session

OVERVIEW = "/v1/warmd/overview"
KEY = TOKEN.encode()


@pytest.fixture
def http(locked: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=locked.url, timeout=20, trust_env=False) as client:
        yield client


def log_in(http: httpx.Client) -> dict[str, str]:
    """Log in; return the header of the second half. The client keeps the cookie."""
    done = http.post("/v1/warmd/login", json={"token": TOKEN}, headers=OURS)
    assert done.status_code == 200
    return {session.HEADER: done.json()["session"]}


def test_the_token_becomes_a_cookie_and_a_secret_for_the_page(http, locked):
    assert http.get("/").status_code == 200
    assert http.get("/page/app.js").status_code == 200
    wrong = http.post("/v1/warmd/login", json={"token": "wrong"}, headers=OURS)
    assert wrong.status_code == 401
    assert wrong.json()["error"]["message"] == "token: is not one that this daemon knows"
    done = http.post("/v1/warmd/login", json={"token": TOKEN}, headers=OURS)
    cookie = done.headers["set-cookie"].lower()
    assert cookie.startswith(f"warmd-{http.base_url.port}=")
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "secure" not in cookie
    secret = done.json()["session"]
    assert TOKEN not in cookie + secret
    assert secret not in cookie
    assert http.get(OVERVIEW, headers={session.HEADER: secret}).status_code == 200


def test_no_token_can_be_guessed_by_made_up_sessions(http):
    made = session.issue("http_token", TOKEN.encode())  # as if the token alone were the key
    begun = time.monotonic()
    name = session.cookie_name(f"127.0.0.1:{http.base_url.port}")
    refused = http.get(
        OVERVIEW, headers={session.HEADER: made.secret, "cookie": f"{name}={made.cookie}"}
    )
    assert refused.status_code == 401
    assert time.monotonic() - begun > 0.9  # like a wrong token


@pytest.mark.slow
@pytest.mark.parametrize("path", [OVERVIEW, "/metrics"])
def test_one_half_of_a_session_opens_nothing(http, path):
    secret = log_in(http)
    assert http.get(path).status_code == 401  # what another port of this host is sent
    assert http.get(path, headers={session.HEADER: "0" * 64}).status_code == 401
    assert http.get(path, headers={session.HEADER: b"\xff"}).status_code == 401
    first = dict(http.cookies)
    second = log_in(http)
    assert http.get(path, headers=secret).status_code == 401  # of another session
    http.cookies.clear()
    assert http.get(path, headers=second).status_code == 401
    http.cookies.update(first)
    with http.stream("GET", path, headers=secret) as whole:
        assert whole.status_code == 200


def test_the_cookie_is_random_and_allows_no_guess_of_the_token(locked):
    one, other = (session.issue("name", key) for key in (KEY, b"another"))
    ends, _, name = one.cookie.split(".")
    assert name == "name"
    assert float(ends) == pytest.approx(time.time() + session.LIFETIME_S, abs=5)
    assert len({one.cookie, other.cookie, session.issue("name", KEY).cookie}) == 3


def test_only_a_whole_session_that_has_not_expired_is_valid(monkeypatch):
    keys = {"ann": b"a" * 16, "bob": b"b" * 16}
    good = session.issue("ann", keys["ann"])
    assert session.verify(good, keys.get) == "ann"
    assert session.verify(good, {"bob": keys["bob"]}.get) is None  # her token is gone
    assert session.verify(good, {"ann": b"new"}.get) is None
    ends, number, _ = good.cookie.split(".")
    for cookie in (
        f"{ends}.{number}.bob",
        f"9{ends}.{number}.ann",
        f"{good.cookie}\n",
        "",
        f"{ends}.{'0' * 64}",  # of an earlier version
    ):
        assert session.verify(Session(cookie, good.secret), keys.get) is None
    monkeypatch.setattr(session, "LIFETIME_S", -1)
    assert session.verify(session.issue("ann", keys["ann"]), keys.get) is None


def test_a_change_needs_our_header(http):
    secret = log_in(http)
    job = {"model": "tiny", "prompt": "1"}
    assert http.post("/v1/completions", json=job, headers=secret).status_code == 403


def test_the_cookie_of_a_public_origin_is_sent_encrypted_only(http):
    headers = {**OURS, "host": "warmd.test", "origin": PUBLIC}
    done = http.post("/v1/warmd/login", json={"token": TOKEN}, headers=headers)
    assert done.headers["set-cookie"].startswith("warmd=")
    assert "secure" in done.headers["set-cookie"].lower()
    http.cookies.clear()


def test_sessions_of_two_tunnels_have_their_own_cookies():
    names = map(session.cookie_name, ("127.0.0.1:8421", "127.0.0.1:9999", "[::1]:8421", "a", ""))
    assert list(names) == ["warmd-8421", "warmd-9999", "warmd-8421", "warmd", "warmd"]


# --- tickets


@pytest.fixture
def address(http: httpx.Client) -> Any:
    """A function that returns an address for one GET."""
    secret = log_in(http)

    def make(path: str) -> str:
        done = http.post("/v1/warmd/tickets", json={"path": path}, headers={**OURS, **secret})
        assert done.status_code == 200
        url: str = done.json()["url"]
        return url

    return make


def test_a_ticket_opens_its_path_once(http, address):
    url = address("/v1/models")
    assert http.get(url).status_code == 200
    assert http.get(url).status_code == 401


def test_a_ticket_is_of_no_use_for_anything_else(http, address):
    ticket = address("/v1/models").partition("?")[2]
    assert http.get(f"/v1/files?{ticket}").status_code == 401
    assert http.get(f"/v1/models?{ticket}").status_code == 401  # used up
    ticket = address("/v1/models").partition("?")[2]
    assert http.get(f"/v1/models?limit=1&{ticket}").status_code == 401
    for method in ("POST", "DELETE", "HEAD"):
        assert http.request(method, f"/v1/models?{ticket}").status_code == 401
    cookies = dict(http.cookies)
    http.cookies.clear()
    assert http.get(f"/v1/models?{ticket}").status_code == 401  # without its session's cookie
    log_in(http)
    assert http.get(f"/v1/models?{ticket}").status_code == 401  # with that of another one
    http.cookies.clear()
    http.cookies.update(cookies)
    assert http.get(f"/v1/models?{ticket}").status_code == 401


def test_a_ticket_is_issued_only_to_a_session(http, gateway):
    bearer = {**OURS, "authorization": f"Bearer {TOKEN}"}
    body = {"path": "/v1/models"}
    assert http.post("/v1/warmd/tickets", json=body, headers=bearer).status_code == 409
    assert http.post("/v1/warmd/tickets", json=body, headers=OURS).status_code == 401
    url = f"{gateway.url}/v1/warmd/tickets"
    assert httpx.post(url, json=body, headers=OURS).status_code == 409


@pytest.mark.parametrize("path", ["//evil.example", "https://evil.example", "/v1/a?b=c", "/", ""])
def test_a_ticket_is_for_a_path_of_the_api(http, path):
    headers = {**OURS, **log_in(http)}
    refused = http.post("/v1/warmd/tickets", json={"path": path}, headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "path"


def test_a_ticket_expires_and_each_session_has_a_number_of_its_own(monkeypatch):
    held = tickets.Tickets()
    owner, other = session.issue("ann", KEY), session.issue("ann", KEY)

    def redeem(url: str, owner: Session) -> str | None:
        path, _, query = url.partition("?")
        return held.redeem(path, query.encode(), owner.cookie)

    others = held.issue("/v1/a", other)
    first = held.issue("/v1/a", owner)
    for _ in range(1000):
        latest = held.issue("/v1/a", owner)
    assert len(held._open) == tickets._MAX_OPEN + 1
    assert redeem(first, owner) is None
    assert redeem(latest, owner) == owner.secret
    assert redeem(others, other) == other.secret
    monkeypatch.setattr(tickets, "LIFETIME_S", 0)
    assert redeem(held.issue("/v1/a", owner), owner) is None


@pytest.mark.slow
def test_a_page_that_only_reads_has_sessions_and_downloads(make_gateway):
    gateway = make_gateway(http_token=TOKEN, http_page="read")
    with httpx.Client(base_url=gateway.url, timeout=20, trust_env=False) as http:
        page = {**OURS, **log_in(http), "origin": gateway.url, "sec-fetch-site": "same-origin"}
        body = {"path": "/v1/models"}
        url = http.post("/v1/warmd/tickets", json=body, headers=page).json()["url"]
        assert http.get(url).status_code == 200
        unload = {"name": "tiny"}
        refused = http.post("/v1/warmd/models/unload", json=unload, headers=page)
        assert refused.status_code == 403
        assert http.post("/v1/warmd/logout", json={}, headers=page).status_code == 204
        assert not http.cookies
