"""Connection limits of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
import uvicorn
from gateway_requests import TOKEN, address
from gateways import Gateway
from uvicorn.server import ServerState
from waiting import wait_until
from watch import Watch

from warmd.configs.config import DaemonConfig
from warmd.daemon.client import tokens
from warmd.daemon.gateway.__main__ import _listen as listen
from warmd.daemon.gateway.http.auth import SILENCE_S, WRONG_S
from warmd.daemon.gateway.http.connection import (
    FRESH_S,
    MAX_CONNECTIONS,
    MAX_STRANGERS,
    UNREAD_S,
    LimitedConnection,
)

LOGIN = (
    b"POST /v1/warmd/login HTTP/1.1\r\nHost: localhost\r\nX-Warmd: 1\r\n"
    b"Content-Type: application/json\r\n"
)
PLACES = 200  # of connections, where a test lowers the limit of open files
STREAM = b'{"model":"tiny","prompt":"1","stream":true}'


@pytest.fixture(scope="module")
def gateway(tiny_model: Path) -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        gateway = Gateway(Path(folder, "home"), tiny_model, http_queue_limit=1000)
        yield gateway
        gateway.close()


def connect(gateway: Gateway) -> socket.socket:
    return socket.create_connection(address(gateway), timeout=30)


def test_a_response_does_not_wait_for_the_acknowledgement_of_its_headers(tmp_path):
    async def delays_writes() -> bool:
        server = uvicorn.Config(lambda: None, http=LimitedConnection, log_config=None)
        server.load()
        connections: Any = ServerState()

        def connection() -> LimitedConnection:
            return LimitedConnection(server, connections, {})

        config = DaemonConfig(home=tmp_path, models=(), http_port=0)
        listening = await asyncio.get_running_loop().create_server(connection, sock=listen(config))
        async with listening:
            host, port = listening.sockets[0].getsockname()
            _, writer = await asyncio.open_connection(host, port)
            while not connections.connections:
                await asyncio.sleep(0.01)
            (accepted,) = connections.connections
            line = accepted.transport.get_extra_info("socket")
            delays = not line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            accepted.transport.abort()
        return delays

    assert not asyncio.run(delays_writes())


def said(gateway: Gateway, request: bytes) -> bytes:
    """Send raw bytes; return what the gateway sends until it closes the connection."""
    with connect(gateway) as line:
        line.sendall(request)
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            while got := line.recv(65536):
                heard += got
        return heard


def request(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


@pytest.mark.slow
def test_content_length_together_with_transfer_encoding_is_refused(gateway):
    headers = ("Content-Length: 6", "Transfer-Encoding: chunked")
    for order in (headers, headers[::-1]):
        heard = said(gateway, request(b"0\r\n\r\nGET /v1/models HTTP/1.1\r\n\r\n", *order))
        assert heard.startswith(b"HTTP/1.1 400")
        assert b"connection: close" in heard.lower()
        assert heard.count(b"HTTP/1.1") == 1


@pytest.mark.slow
def test_body_in_a_few_chunks_is_read_and_one_in_tiny_chunks_is_refused(gateway):
    def chunked(body: bytes, size: int) -> bytes:
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])

    wrong = b'{"model":"nope","prompt":"' + b"1" * 1000 + b'"}'
    headers = ("Transfer-Encoding: chunked", "Connection: close")
    assert b"no model" in said(gateway, request(chunked(wrong, 500), *headers))
    assert said(gateway, request(chunked(wrong, 1), *headers)).startswith(b"HTTP/1.1 400")


@pytest.mark.slow
def test_request_with_thousands_of_headers_is_refused(gateway):
    heard = said(gateway, request(b"", *(["a:"] * 3000)))
    assert heard.startswith(b"HTTP/1.1 400")


@pytest.mark.slow
def test_connection_beyond_the_limit_replaces_the_longest_idle_one(gateway):
    with contextlib.ExitStack() as open_lines:
        first = open_lines.enter_context(connect(gateway))
        for _ in range(MAX_CONNECTIONS - 1):
            open_lines.enter_context(connect(gateway))
        assert httpx.get(f"{gateway.url}/v1/models", timeout=10).status_code == 200
        first.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert first.recv(1) == b""


STREAMS = pytest.mark.nightly(
    part="clients", catches="streams that keep every other connection out"
)
IDLE = pytest.mark.nightly(
    part="clients", catches="an idle connection of a kind that ends the streams of others"
)
CROWDS = {
    "unfinished bodies": request(b"{", "Content-Length: 60000"),
    "streams": b"GET /v1/warmd/overview/stream HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "crowd",
    [pytest.param(crowd, marks=STREAMS if crowd == "streams" else ()) for crowd in CROWDS],
)
def test_connections_that_take_all_places_make_room_for_others(gateway, crowd):
    with contextlib.ExitStack() as open_lines:
        lines = []
        for _ in range(MAX_CONNECTIONS):
            lines.append(open_lines.enter_context(connect(gateway)))
            lines[-1].sendall(CROWDS[crowd])
        if crowd == "streams":
            for line in lines:
                assert line.recv(8) == b"HTTP/1.1"
        for _ in range(20):
            assert httpx.get(f"{gateway.url}/v1/models", timeout=5).status_code == 200


def burst(gateway: Gateway, open_lines: contextlib.ExitStack, sent: bytes) -> None:
    """Open PLACES + 50 connections at once, and send bytes over each after that."""
    lines = [open_lines.enter_context(socket.socket()) for _ in range(PLACES + 50)]
    for line in lines:
        line.setblocking(False)
        line.connect_ex(address(gateway))
    for line in lines:
        line.setblocking(True)
        with contextlib.suppress(OSError):  # closed already
            line.sendall(sent)


def open_streams(
    gateway: Gateway, open_lines: contextlib.ExitStack, *headers: str
) -> list[socket.socket]:
    """Begin 6 streams of completions; each has sent its first bytes."""
    lines = [open_lines.enter_context(connect(gateway)) for _ in range(6)]
    for line in lines:
        line.sendall(request(STREAM, f"Content-Length: {len(STREAM)}", *headers))
    for line in lines:
        assert line.recv(15) == b"HTTP/1.1 200 OK"
    return lines


def finish_streams(gateway: Gateway, lines: list[socket.socket]) -> None:
    """Complete the jobs of the streams, and check that each is whole."""
    for _ in lines:
        gateway.take().finish("text")
    for line in lines:
        heard = b""
        while b"[DONE]" not in heard:
            got = line.recv(65536)
            assert got, heard
            heard += got


@pytest.mark.slow
@pytest.mark.parametrize(
    "idle",
    ["half a request", *(pytest.param(i, marks=IDLE) for i in ("silent", "after a response"))],
)
def test_a_burst_of_idle_connections_ends_no_stream(gateway, idle):
    with gateway.few_places(PLACES), contextlib.ExitStack() as open_lines:
        streams = open_streams(gateway, open_lines)
        if idle == "after a response":
            for _ in range(PLACES + 50):
                line = open_lines.enter_context(connect(gateway))
                line.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert line.recv(15) == b"HTTP/1.1 200 OK"
        else:
            burst(gateway, open_lines, b"GET /" if idle == "half a request" else b"")
        for _ in range(20):
            assert httpx.get(f"{gateway.url}/v1/models", timeout=5).status_code == 200
        finish_streams(gateway, streams)


STRANGERS = {
    "silent": b"",
    "wrong tokens": b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer x\r\n\r\n",
    "slow logins": LOGIN + b"Content-Length: 90\r\n\r\n{",
}


@pytest.mark.nightly(
    part="clients", catches="strangers whose connections end the streams of those with a name"
)
def test_a_burst_of_connections_without_a_token_ends_no_stream_of_a_name(make_gateway, tmp_path):
    file = tmp_path / "tokens"
    gateway = make_gateway(http_tokens=file)
    secret = tokens.add(file, "ada", "read,infer")
    headers = {"authorization": f"Bearer {secret}"}
    models = partial(httpx.get, f"{gateway.url}/v1/models", headers=headers, timeout=5)
    wait_until(lambda: models().status_code == 200, timeout_s=10)
    for sent in STRANGERS.values():
        with gateway.few_places(PLACES), contextlib.ExitStack() as open_lines:
            named = f"Authorization: Bearer {secret}"
            streams = open_streams(gateway, open_lines, named)
            burst(gateway, open_lines, sent)
            for _ in range(20):
                assert models().status_code == 200
            finish_streams(gateway, streams)


@pytest.mark.slow
def test_connections_without_a_token_have_a_share_of_their_own(make_gateway):
    gateway = make_gateway(http_token=TOKEN)
    headers = {"authorization": f"Bearer {TOKEN}"}
    login = LOGIN + b"Content-Length: 90\r\n\r\n{"
    with contextlib.ExitStack() as open_lines, httpx.Client(headers=headers) as client:
        assert client.get(f"{gateway.url}/v1/models").status_code == 200  # it stays connected
        lines = [open_lines.enter_context(connect(gateway)) for _ in range(MAX_STRANGERS)]
        for line in lines:
            line.sendall(login)
        first = lines[0]
        time.sleep(FRESH_S)  # the claim is that from now on they are not fresh
        for _ in range(20):
            assert httpx.get(f"{gateway.url}/v1/models", headers=headers).status_code == 200
        first.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert first.recv(1) == b""
        assert client.get(f"{gateway.url}/v1/models").status_code == 200


@pytest.mark.slow
def test_without_the_token_a_request_is_small_and_takes_no_shared_memory(make_gateway):
    gateway = make_gateway(http_token=TOKEN)
    announced = LOGIN + b"Content-Length: %d\r\n\r\n" % (64 * 2**20)
    chunks = b"1000\r\n" + b"[" * 4096 + b"\r\n"
    for sent in (announced, LOGIN + b"Transfer-Encoding: chunked\r\n\r\n" + 2 * chunks):
        with connect(gateway) as line:
            line.sendall(sent)
            heard = b""
            while b"}}" not in heard:
                heard += line.recv(4096)
            assert heard.startswith(b"HTTP/1.1 413")
            assert b"a request without token must have at most 4 KiB" in heard


@pytest.mark.slow
def test_a_wrong_token_is_refused_after_a_second(make_gateway):
    gateway = make_gateway(http_token=TOKEN)
    for how in ("header", "login"):
        begun = time.monotonic()
        if how == "header":
            headers = {"authorization": "Bearer x"}
            wrong = httpx.get(f"{gateway.url}/v1/models", headers=headers, timeout=60)
        else:
            headers = {"x-warmd": "1"}
            url = f"{gateway.url}/v1/warmd/login"
            wrong = httpx.post(url, json={"token": "x"}, headers=headers, timeout=60)
        assert wrong.status_code == 401
        assert time.monotonic() - begun >= WRONG_S


@pytest.mark.nightly(part="clients", catches="a fast begin that lets a body stop for minutes")
def test_a_body_that_becomes_slow_is_given_up_within_a_minute(gateway):
    with connect(gateway) as line:
        line.sendall(request(b" " * 4_000_000, "Content-Length: 8000000"))
        begun = time.monotonic()
        heard = b""
        line.settimeout(5)
        while not heard:
            assert time.monotonic() - begun < 2 * SILENCE_S + 5
            with contextlib.suppress(TimeoutError):
                line.sendall(b" ")
                heard = line.recv(4096)
        assert heard.startswith(b"HTTP/1.1 408")


@pytest.mark.nightly(
    part="clients", catches="limits of connections that hold for one client and not for hundreds"
)
def test_hundreds_of_streams_and_half_open_connections_block_nobody(gateway):
    with contextlib.ExitStack() as open_lines, Watch(gateway) as watch:
        for n in range(500):
            stream = open_lines.enter_context(connect(gateway))
            stream.sendall(request(STREAM, f"Content-Length: {len(STREAM)}"))
            half = open_lines.enter_context(connect(gateway))
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHo" if n % 2 else b"")
        wait_until(lambda: len(gateway.waiting()) == 500, timeout_s=120)
        for _ in range(50):
            job = gateway.take()
            job.write("text")
            job.finish("text")
    wait_until(lambda: gateway.waiting() == [], timeout_s=60)  # or the next test takes these jobs
    watch.check()


@pytest.mark.nightly(
    part="clients", catches="limits of connections that hold for one client and not for hundreds"
)
def test_client_that_stops_reading_is_disconnected_and_fills_no_memory(gateway):
    process = psutil.Process(gateway.process.pid)
    with connect(gateway) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.sendall(request(STREAM, f"Content-Length: {len(STREAM)}"))
        job = gateway.take()
        before, begun = process.memory_info().rss, time.monotonic()
        seen = 0
        while not job.stop_asked and time.monotonic() - begun < 4 * UNREAD_S:
            for _ in range(20):
                job.write("x" * 20_000)  # far more than a token
            seen = max(seen, process.memory_info().rss - before)
        assert job.stop_asked == "cancel"
        assert time.monotonic() - begun > UNREAD_S - 1
        assert seen < 100e6
        job.fail("stopped")


@pytest.mark.nightly(part="clients", catches="a stream that a slow reader gets in part")
def test_slow_client_receives_the_whole_stream(gateway):
    import orjson

    pieces: list[Any] = []
    with connect(gateway) as line:
        line.sendall(request(STREAM, f"Content-Length: {len(STREAM)}", "Connection: close"))
        job = gateway.take()
        for n in range(1500):
            job.write(f"{n} " + "x" * 3000)
        job.finish("so")
        heard = b""
        while got := line.recv(1 << 20):
            heard += got
    lines = [text for text in heard.split(b"\n") if text.startswith(b"data: {")]
    pieces = [orjson.loads(text[6:])["choices"][0]["text"] for text in lines]
    assert [piece.split()[0] for piece in pieces if piece] == [str(n) for n in range(1500)]
