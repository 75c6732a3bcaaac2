"""Named tokens: who is let in, what they may do, and how they are shut out."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import orjson
import pytest
from click.testing import CliRunner
from daemons import Daemon
from fastapi.routing import APIRoute
from gateway_requests import address
from gateways import Gateway
from starlette.routing import Route
from waiting import wait_until

from warmd.cli.main import warmd
from warmd.configs.config import DaemonConfig, check_http
from warmd.configs.tokens import NamedToken, digest_of
from warmd.daemon.client import tokens
from warmd.daemon.gateway.app import _ROUTERS, create_app
from warmd.daemon.gateway.http import session
from warmd.daemon.gateway.http.rights import ANY, INFER, OPEN, READ, ROUTES, TRAIN, RouteRights

pytestmark = pytest.mark.nightly(
    part="clients", catches="a named token that opens more than its rights, or outlives its entry"
)

MAIN = "the-main-token-of-tests"
WITHIN_S = 5  # the promise of the documentation
OWN = {"x-warmd": "1", "content-type": "application/json"}
STREAM = "/v1/warmd/overview/stream"
PROMPT = b'{"model":"tiny","prompt":"1","stream":true}'


def entry(name: str, may: str) -> str:
    """The line of a token whose secret is `secret-of-NAME`."""
    return NamedToken(name, frozenset(may.split(",")), digest_of(f"secret-of-{name}")).line


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {MAIN if name == 'http_token' else f'secret-of-{name}'}"}


class Named:
    """A gateway with a file of named tokens."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.file = folder / "tokens"
        self.set(ada="read,infer,train")
        self.gateway = Gateway(
            folder / "home", model, http_token=MAIN, http_tokens=self.file, http_queue_limit=4
        )
        self.url = self.gateway.url

    def set(self, **entries: str) -> None:
        """Replace the file, as editors do: by a rename."""
        self.write("".join(f"{entry(name, may)}\n" for name, may in entries.items()))

    def write(self, text: str, mode: int = 0o600) -> None:
        new = self.file.with_name("tokens.new")
        new.write_text(text)
        new.chmod(mode)
        new.rename(self.file)

    def ask(self, name: str, path: str, method: str = "GET", **more: Any) -> httpx.Response:
        headers = {**bearer(name), **more.pop("headers", {})}
        return httpx.request(method, self.url + path, headers=headers, timeout=30, **more)

    def wait_for(self, name: str, status: int, path: str = "/v1/models") -> None:
        """Wait until a request has a status; wrong tokens are refused after a second."""
        wait_until(lambda: self.ask(name, path).status_code == status, timeout_s=WITHIN_S + 1)


@pytest.fixture(scope="module")
def one(tiny_model: Path) -> Iterator[Named]:
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        named = Named(Path(folder), tiny_model)
        yield named
        named.gateway.close()


@pytest.fixture
def named(one: Named) -> Iterator[Named]:
    """A gateway whose queue is empty."""
    yield one
    one.gateway.hang_up()
    one.gateway.drop_waiting()


# --- rights --------------------------------------------------------------------------------------


def test_every_route_has_a_right_in_the_table_and_the_table_has_no_others(tmp_path):
    app = create_app(DaemonConfig(home=tmp_path), "unix:///nowhere")
    served = {
        (route.path, method)
        for router in _ROUTERS
        for route in router.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    }
    served |= {("/openapi.json", method) for method in ("GET", "HEAD")}
    assert served == {(path, method) for path, needs in ROUTES.items() for method in needs}
    documented = {
        (path, method.upper())
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    assert documented <= served
    changes = {
        (path, method): right
        for path, needs in ROUTES.items()
        for method, right in needs.items()
        if method not in ("GET", "HEAD")
    }
    may_infer = {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
        *("/v1/rerank", "/v2/rerank", "/tokenize", "/detokenize"),
    }
    assert {path for (path, _), right in changes.items() if right == INFER} == may_infer
    others = {key: right for key, right in changes.items() if key[0] not in may_infer}
    assert others.pop(("/v1/warmd/login", "POST")) == OPEN
    for of_session in ("logout", "tickets"):
        assert others.pop((f"/v1/warmd/{of_session}", "POST")) == ANY
    assert set(others.values()) == {TRAIN}


def test_a_route_without_a_right_keeps_the_gateway_from_starting():
    async def secret() -> None: ...

    with pytest.raises(LookupError, match=r"/v1/secret: no right is stated for GET"):
        RouteRights([APIRoute("/v1/secret", secret)])


def placed(path: str) -> str:
    """A request's path for a route."""
    job = "sft-20260101-000000-aaaa"
    for part, value in (("{job_id}", job), ("{group_id}", "sweep-1"), ("{action}", "cancel")):
        path = path.replace(part, value)
    return path.replace("{file_id}", "file-x").replace("{name}", "tiny")


def test_each_right_opens_its_routes_and_no_others(named):
    named.set(ada="read,infer,train", r="read", i="infer", t="train")
    named.wait_for("t", 200)
    for path, needs in ROUTES.items():
        for method, needed in needs.items():
            if needed == OPEN or path.endswith("/stream"):
                continue
            for name, right in (("r", READ), ("i", INFER), ("t", TRAIN)):
                more: dict[str, Any] = {} if method == "GET" else {"json": {}, "headers": OWN}
                answer = named.ask(name, placed(path), method, **more)
                is_refused = needed not in (ANY, right)
                assert (answer.status_code == 403) is is_refused, (path, method, name)
                if is_refused and method != "HEAD":
                    error = answer.json()["error"]
                    assert error["code"] == "insufficient_permissions"
                    assert error["type"] == "permission_error"
                    assert error["message"].startswith(
                        f"Authorization: must be a token with the right {needed} for {method} "
                    )
                    assert error["message"].endswith(f", got {name} ({right})")
    named.set(ada="read,infer,train")
    named.wait_for("r", 401)


def test_without_a_token_only_the_open_routes_answer(named):
    with httpx.Client(base_url=named.url, headers=OWN) as client:
        for path, needs in ROUTES.items():
            for method, needed in needs.items():
                more: dict[str, Any] = {} if method == "GET" else {"json": {}}
                status = client.request(method, placed(path), **more).status_code
                assert (status == 401) is (needed != OPEN), (method, path)


def test_wrong_secrets_names_and_hashes_are_not_let_in(named):
    for given in (digest_of("secret-of-ada"), "ada", entry("ada", "read"), "x"):
        answer = httpx.get(f"{named.url}/v1/models", headers={"authorization": f"Bearer {given}"})
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert named.ask("ada", "/v1/models").status_code == 200
    assert named.ask("http_token", "/v1/models").status_code == 200


@contextlib.contextmanager
def logged_in(named: Named, name: str) -> Iterator[httpx.Client]:
    """A client with a session of the dashboard."""
    with httpx.Client(base_url=named.url, headers={"sec-fetch-site": "same-origin"}) as client:
        login = client.post("/v1/warmd/login", json={"token": f"secret-of-{name}"}, headers=OWN)
        assert login.status_code == 200
        client.headers[session.HEADER] = login.json()["session"]
        yield client


# --- in and out ----------------------------------------------------------------------------------


def open_stream(named: Named, name: str, body: bytes | None = None) -> socket.socket:
    """Begin a stream: of the overview or, with a body, of a completion."""
    host, port = address(named.gateway)
    line = socket.create_connection((host, port), timeout=30)
    head = f"GET {STREAM}" if body is None else "POST /v1/completions"
    line.sendall(
        f"{head} HTTP/1.1\r\nHost: {host}\r\nAuthorization: {bearer(name)['authorization']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body or b'')}\r\n\r\n".encode()
        + (body or b"")
    )
    assert line.recv(15) == b"HTTP/1.1 200 OK"
    return line


def rest(line: socket.socket) -> bytes:
    """What comes until the gateway closes the connection, or nothing comes for some time."""
    heard = b""
    line.settimeout(WITHIN_S)
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        while not heard.endswith(b"0\r\n\r\n") and (got := line.recv(65536)):
            heard += got
    return heard


def assert_open(line: socket.socket) -> None:
    """Fail if a stream has ended."""
    line.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        while got := line.recv(65536):
            assert b"event: problem" not in got
        raise AssertionError("the stream has ended")


def test_a_name_that_is_taken_out_loses_streams_requests_and_sessions(named, background):
    named.set(ada="read,infer,train", bob="read,infer")
    named.wait_for("bob", 200)
    with (
        logged_in(named, "bob") as page,
        open_stream(named, "ada") as hers,
        open_stream(named, "bob") as his,
        open_stream(named, "bob", PROMPT) as completion,
    ):
        assert page.get("/v1/warmd/overview").json()["may"] == ["read", "infer"]
        streamed = named.gateway.take()
        body = {"model": "tiny", "prompt": "2"}
        whole = background.submit(
            lambda: named.ask("bob", "/v1/completions", "POST", json=body).status_code
        )
        waiting = named.gateway.take()
        begun = time.monotonic()
        named.set(ada="read,infer,train")
        last = rest(his)
        assert b"event: problem\ndata: " in last
        assert b"invalid_api_key" in last
        assert b'\ndata: {"error":{"message":"Authorization: must be' in rest(completion)
        assert whole.result(WITHIN_S) == 401
        assert time.monotonic() - begun < WITHIN_S
        assert page.get("/v1/warmd/overview").status_code == 401
        assert_open(hers)
        wait_until(lambda: streamed.stop_asked == "cancel" and waiting.stop_asked == "cancel")
    for job in (streamed, waiting):
        job.fail("stopped")
    assert named.ask("bob", "/v1/models").status_code == 401


def test_a_name_that_loses_a_right_loses_the_requests_that_need_it(named):
    named.set(ada="read,infer,train", bob="read,infer")
    named.wait_for("bob", 200)
    with open_stream(named, "bob") as overview, open_stream(named, "bob", PROMPT) as completion:
        job = named.gateway.take()
        named.set(ada="read,infer,train", bob="read")
        assert b"bob has lost the right infer" in rest(completion)
        assert_open(overview)
        wait_until(lambda: job.stop_asked == "cancel")
        job.fail("stopped")
    assert named.ask("bob", "/v1/completions", "POST", json={}).status_code == 403
    named.set(ada="read,infer,train", bob="read,infer")
    wait_until(lambda: named.ask("bob", "/v1/completions", "POST", json={}).status_code == 400)


def test_a_new_secret_ends_the_sessions_of_the_old_one(named):
    named.set(ada="read,infer,train", bob="read")
    named.wait_for("bob", 200)
    with logged_in(named, "bob") as client:
        assert client.get("/v1/warmd/jobs").status_code == 200
        new = NamedToken("bob", frozenset({"read"}), digest_of("another"))
        named.write(f"{entry('ada', 'read,infer,train')}\n{new.line}\n")
        wait_until(lambda: client.get("/v1/warmd/jobs").status_code == 401, timeout_s=WITHIN_S)


def test_a_session_is_bound_to_its_name_and_needs_more_than_the_file(named):
    with logged_in(named, "ada") as client:
        (cookie,) = client.cookies.jar
        secret = client.headers[session.HEADER]
        assert client.get("/v1/warmd/jobs").status_code == 200
    name, value = cookie.name, str(cookie.value)
    assert value.endswith(".ada")
    digest = digest_of("secret-of-ada")
    of_the_file = [session.issue("ada", key) for key in (digest.encode(), bytes.fromhex(digest))]
    for forged in (
        session.Session(value.replace(".ada", ".bob"), secret),
        session.Session(value.replace(".ada", ".http_token"), secret),
        session.Session(value, secret[::-1]),
        *of_the_file,
    ):
        headers = {"cookie": f"{name}={forged.cookie}", session.HEADER: forged.secret}
        assert httpx.get(f"{named.url}/v1/warmd/jobs", headers=headers).status_code == 401


def test_a_token_that_may_not_read_gets_no_session(make_gateway, tmp_path):
    file = tmp_path / "tokens"
    secret = tokens.add(file, "bot", "infer")
    gateway = make_gateway(http_tokens=file)
    answer = httpx.post(f"{gateway.url}/v1/warmd/login", json={"token": secret}, headers=OWN)
    assert answer.status_code == 403
    assert "must have the right read" in answer.json()["error"]["message"]


@pytest.mark.parametrize("fault", ["mistake", "gone", "open to others", "not a file"])
def test_a_file_that_cannot_be_used_lets_in_only_those_whose_entries_can_be_read(named, fault):
    named.set(ada="read,infer,train", bob="read", carol="read")
    named.wait_for("carol", 200)
    lines = f"{entry('ada', 'read,infer,train')}\n{entry('bob', 'read,train')}\n"
    if fault == "mistake":  # bob has more rights, carol was taken out, dave is new
        named.write(f"{lines}{entry('dave', 'read')}\neve read sha256:abc\n")
    elif fault == "gone":
        named.file.unlink()
    elif fault == "open to others":
        named.file.chmod(0o640)
    else:
        named.file.unlink()
        os.mkfifo(named.file, 0o600)
    named.wait_for("carol", 401)
    stays = 401
    if fault == "mistake":
        stays = 200
        for name in ("bob", "dave"):
            assert named.ask(name, "/v1/models").status_code == 401
    assert named.ask("ada", "/v1/models").status_code == stays
    assert named.ask("http_token", "/v1/models").status_code == 200
    if fault == "not a file":
        named.file.unlink()
    named.set(ada="read,infer,train")
    named.wait_for("ada", 200)


def test_a_file_that_editors_write_in_steps_shuts_nobody_out(named):
    named.set(ada="read,infer,train")
    named.wait_for("ada", 200)
    text = named.file.read_text()
    with open_stream(named, "ada") as stream:
        begun = time.monotonic()
        while time.monotonic() - begun < 3:
            named.file.write_text("")
            time.sleep(0.001)
            named.file.write_text(text)
            time.sleep(0.3)
        assert_open(stream)


# --- who it was ----------------------------------------------------------------------------------


def test_jobs_have_the_name_of_the_token_and_are_not_hidden_from_others(named, background):
    method: Any = {"type": "reinforcement", "reinforcement": {"hyperparameters": {}}}
    options = {"model": "tiny", "training_file": "arithmetic", "method": method}
    for name in ("ada", "http_token"):
        made = named.ask(name, "/v1/fine_tuning/jobs", "POST", json=options).json()
        shown = named.ask("http_token", f"/v1/warmd/jobs/{made['id']}").json()["job"]
        assert shown["submitted_by"] == name
        named.gateway.client.jobs.cancel(made["id"])
    answer = background.submit(
        lambda: named.ask("ada", "/v1/completions", "POST", json={"model": "tiny", "prompt": "2"})
    )
    job = named.gateway.take()
    assert named.gateway.client.jobs.get(job.job.id)["submitted_by"] == "ada"
    job.finish("x")
    assert answer.result(10).status_code == 200
    body = {**options, "seeds": 2}
    sweep = named.ask("ada", "/v1/warmd/sweeps", "POST", json=body, headers=OWN)
    members = named.gateway.client.groups.sweep_members(sweep.json()["id"])
    assert {named.gateway.client.jobs.get(one)["submitted_by"] for one in members} == {"ada"}
    for one in members:
        named.gateway.client.jobs.cancel(one)


def test_changes_are_logged_with_the_name_and_secrets_never(make_gateway, capfd, tmp_path):
    file = tmp_path / "tokens"
    file.write_text(f"{entry('ada', 'read,train')}\n")
    file.chmod(0o600)
    gateway = make_gateway(http_tokens=file)
    with httpx.Client(base_url=gateway.url, headers={**bearer("ada"), **OWN}) as client:
        client.post("/v1/warmd/models/unload", json={"name": "tiny"})
        client.post("/v1/fine_tuning/jobs/x%0Aforged/cancel")
        client.post("/v1/completions", json={})
    gateway.close()
    log = capfd.readouterr().err
    assert "http: tokens: ada may read,train" in log
    assert "http: ada: POST /v1/warmd/models/unload: 503" in log
    assert "http: ada: POST /v1/fine_tuning/jobs/x%0Aforged/cancel: 404" in log
    assert "http: ada: refused: needs infer" in log
    assert "secret-of-ada" not in log
    assert digest_of("secret-of-ada") not in log


# --- small things --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"tiny","prompt":"1","prompt":"2"}',
        b'{"model":"tiny","prompt":"\\"1:","\\u0070rompt" : "2"}',
        b'{"model":"tiny","prompt":"1","response_format":{"type":"text","type":"text"}}',
    ],
)
def test_a_key_that_stands_twice_is_refused(named, body):
    answer = named.ask("ada", "/v1/completions", "POST", content=body, headers=OWN)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "an object must have each key once, got one again"


@pytest.mark.parametrize(
    "prompt", ['"a": "b"', '\\":', "\\\\", '\\\\":{":', ":::", '":"', 'a\\\\" : 1', ""]
)
def test_colons_and_quotes_within_texts_are_not_keys(named, prompt):
    body = orjson.dumps({"model": "nope", "prompt": [prompt, prompt], "seed": 1})
    answer = named.ask("ada", "/v1/completions", "POST", content=body, headers=OWN)
    assert "each key once" not in answer.text
    assert answer.status_code in (400, 404)


def test_errors_do_not_show_the_path_of_the_home(named):
    for path in ("/v1/warmd/jobs/sft-20260101-000000-aaaa", "/health"):
        answer = named.ask("ada", path)
        assert answer.status_code in (404, 503)
        assert str(named.gateway.home.path) not in answer.text
        assert "HOME" in answer.text


def test_a_token_that_is_set_only_in_the_file_is_enough_to_listen_elsewhere(tmp_path):
    check_http(DaemonConfig(home=tmp_path, http_host="0.0.0.0", http_tokens=tmp_path / "tokens"))


# --- the daemon ----------------------------------------------------------------------------------


def test_status_shows_the_users_of_the_gateway_and_the_error_of_an_invalid_file(tiny_model):
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        home, file = Path(folder, "home"), Path(folder, "tokens")
        bob = tokens.add(file, "bob", "read")
        daemon = Daemon(home, tiny_model, http_port=0, http_tokens=file, workers=())
        daemon.start()
        try:
            url = wait_until(lambda: daemon.status()["http"]["url"])

            def users() -> Any:
                return daemon.status()["http"]["tokens"]

            wait_until(lambda: users() == {"named": 1, "problem": None, "open": []})
            headers = {"authorization": f"Bearer {bob}"}
            with httpx.stream("GET", url + STREAM, headers=headers, timeout=30) as stream:
                lines = stream.iter_lines()
                assert next(lines)
                shown = {"name": "bob", "requests": 1, "streams": 1}
                wait_until(lambda: users()["open"] == [shown])
                assert re.search(r"\nbob +1 +1\n", status_of(home, file))
                tokens.remove(file, "bob")
                assert any("invalid_api_key" in line for line in lines)
            wait_until(lambda: users() == {"named": 0, "problem": None, "open": []})
            file.chmod(0o644)
            wait_until(lambda: users()["problem"])
            assert "must have mode 0600, got 0644" in status_of(home, file)
        finally:
            daemon.stop(now=True)


def status_of(home: Path, file: Path) -> str:
    """What `warmd status` prints."""
    runner = CliRunner(env={"WARMD_HTTP_TOKENS": str(file)})
    done = runner.invoke(warmd, ["status", "--home", str(home)])
    assert done.exit_code == 0, done.exception
    return done.output
