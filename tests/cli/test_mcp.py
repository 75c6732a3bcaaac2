"""`warmd mcp`: experiments by an agent's client, and what its requests send and refuse."""

from __future__ import annotations

import asyncio
import http.server
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from daemons import Daemon
from environments import environment
from needs import needs
from shell import warmd
from waiting import wait_until

from warmd.cli.mcp.gateway import Gateway, Refused, checked_address
from warmd.jobs.errors import SpecError, Unavailable

SCRIPT = Path(__file__).parent / "with_mcp.py"
SECRET = "a-token-of-tests"


@contextmanager
def answering(status: int, body: bytes, **headers: str) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers every request alike; its address and the requests it received."""
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()
        thread.join()


def test_the_token_is_sent_to_the_gateway_and_along_no_redirect_or_proxy(monkeypatch):
    with (
        answering(200, b"{}") as (elsewhere, others),
        answering(302, b"", Location=f"{elsewhere}/stolen") as (url, received),
    ):
        monkeypatch.setenv("http_proxy", elsewhere)
        gateway = Gateway(lambda: f"{url}/", SECRET)
        with pytest.raises(Refused, match="HTTP 302"):
            asyncio.run(gateway.get("/v1/models", status=None, limit=3))
        assert others == []
        ((path, headers),) = received
        assert path == "/v1/models?limit=3"
        assert headers["authorization"] == f"Bearer {SECRET}"


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"error": {"message": "seed: must be whole"}}', "seed: must be whole"),
        pytest.param(502, b"<html>", "HTTP 502: Bad Gateway", marks=pytest.mark.slow),
        pytest.param(404, b'{"error": "no"}', "HTTP 404: Not Found", marks=pytest.mark.slow),
    ],
)
def test_a_refusal_has_the_words_of_the_gateway(status, body, message):
    with answering(status, body) as (url, _), pytest.raises(Refused) as caught:
        asyncio.run(Gateway(lambda: url, None).get("/v1/models"))
    assert str(caught.value) == message


def test_something_else_that_answers_is_named():
    with answering(200, b"hello") as (url, _), pytest.raises(Unavailable) as caught:
        asyncio.run(Gateway(lambda: url, None).get("/v1/models"))
    assert str(caught.value).startswith(f"the gateway does not answer at {url}: ")


@pytest.mark.parametrize(
    "url", ["localhost:8421", "ftp://a", "http://", "/tmp/x", "http://[", "http://a:b"]
)
def test_a_wrong_address_is_refused(url):
    with pytest.raises(SpecError) as caught:
        checked_address(url)
    assert str(caught.value) == f"url: must be http://HOST:PORT or https://HOST, got {url!r}"
    assert checked_address("https://warmd.test") == "https://warmd.test"


def test_a_gateway_that_is_not_there_is_named():
    with pytest.raises(
        Unavailable, match=r"the gateway does not answer at http://127\.0\.0\.1:1: "
    ):
        asyncio.run(Gateway(lambda: "http://127.0.0.1:1", None).get("/v1/models"))


def test_without_its_package_the_command_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.delitem(sys.modules, "warmd.cli.mcp.tools", raising=False)
    done = warmd("mcp", home=tmp_path)
    assert done.is_refusal(2)
    assert done.err == "Error: mcp: needs the package mcp: pip install 'warmd[mcp]'\n"


@pytest.mark.nightly(
    part="clients", catches="an answer of a tool with which an agent cannot continue"
)
def test_an_agent_trains_evaluates_and_compares_and_names_no_code_or_path(
    shared_daemon: Daemon, python: Path
):
    wait_until(lambda: shared_daemon.status()["http"]["url"])
    ran = subprocess.run(
        [python, SCRIPT, str(shared_daemon.home.path)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stderr == ""
    listed, *calls = map(orjson.loads, ran.stdout.splitlines())
    changing = {"upload", "submit", "evaluate", "cancel", "resume"}
    assert {name for name, is_read_only in listed["tools"].items() if not is_read_only} == changing
    good, refused = calls[:18], calls[18:]
    assert [call["tool"] for call in good if call["is_error"]] == []
    (
        kinds, options, models, file, files, base, base_ended, check, job, ended,
        metrics, samples, _, second_ended, differences, _, longer, jobs,
    ) = (orjson.loads(call["text"]) for call in good)  # fmt: skip
    assert [kind["kind"] for kind in kinds] == ["grpo", "sft", "dpo", "mlm"]
    assert "learning_rate" in [option["name"] for option in options]
    assert "tiny" in models
    assert files[0]["id"] == file["id"]
    assert base_ended["id"] == base["id"]
    assert base_ended["status"] == "finished"
    assert (check["problem"], check["steps_total"]) == (None, 2)
    assert (job["steps_total"], ended["status"], ended["step"]) == (4, "finished", 4)
    assert [len(curve) for curve in metrics["metrics"].values()] == [4]
    assert (samples["step"], len(samples["samples"]), samples["left_out"]) == (4, 1, 1)
    assert second_ended["result"]["comparison"]["reward"]["words"]
    assert "weights" in [difference["name"] for difference in differences]
    assert (longer["status"], longer["step"]) == ("finished", 6)
    assert [one["id"] for one in jobs] == [job["id"]]
    assert good[9]["progress"][-1][:2] == [4, 4]
    assert [call["tool"] for call in refused if not call["is_error"]] == []
    words = [call["text"].partition(f"tool {call['tool']}: ")[2] for call in refused]
    assert [text.partition(":")[0] for text in words] == [
        "job", "method.reinforcement.hyperparameters.rewad", "training_file", "model",
        "method.reinforcement.hyperparameters.reward", "options.dataset", "job", "names", "kind",
    ]  # fmt: skip


@pytest.mark.nightly(part="clients", catches="an answer that other MCP clients do not understand")
def test_the_inspector_lists_and_calls_tools(tmp_path: Path, shared_daemon: Daemon, python: Path):
    needs(shutil.which("npm"), "npm")
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(tmp_path)]
    subprocess.run([*install, "@modelcontextprotocol/inspector"], check=True)
    wait_until(lambda: shared_daemon.status()["http"]["url"])
    server = tmp_path / "server"
    home = shared_daemon.home.path
    server.write_text(f"#!/bin/sh\nexec {python} -m warmd.cli --home {home} mcp\n")
    server.chmod(0o755)

    def inspect(*words: str) -> dict[str, Any]:
        program = tmp_path / "node_modules" / ".bin" / "mcp-inspector"
        command = [str(program), "--cli", str(server), *words]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (ran.returncode, ran.stderr) == (0, "")
        found: dict[str, Any] = orjson.loads(ran.stdout)
        return found

    def call(tool: str, *arguments: str) -> tuple[bool, str]:
        given = [word for argument in arguments for word in ("--tool-arg", argument)]
        found = inspect("--method", "tools/call", "--tool-name", tool, *given)
        (part,) = found["content"]
        return found.get("isError", False), part["text"]

    listed = inspect("--method", "tools/list")["tools"]
    assert {"kinds", "submit", "wait"} < {tool["name"] for tool in listed}
    assert all(tool["inputSchema"]["type"] == "object" for tool in listed)
    is_error, text = call("models")
    assert not is_error
    assert "tiny" in orjson.loads(text)
    options = 'options={"samples": 2, "num_generations": 2, "max_completion_length": 2}'
    is_error, text = call("submit", "kind=grpo", "model=tiny", "data=arithmetic", options)
    assert not is_error, text
    job = orjson.loads(text)["id"]
    is_error, text = call("wait", f"job={job}", "timeout_s=60")
    assert orjson.loads(text)["status"] == "finished"
    is_error, text = call("jobs", "limit=1", "kind=grpo")
    assert [one["id"] for one in orjson.loads(text)] == [job]
    assert call("kinds", "kind=evil")[0]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the package `mcp`; what it lacks of warmd's comes from this one."""
    folder = tmp_path_factory.mktemp("mcp") / "environment"
    return environment(folder, "mcp>=2.0,<3", shares=True)
