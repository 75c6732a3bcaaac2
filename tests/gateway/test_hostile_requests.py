"""Requests that are too large, unfinished, or have nonsense in their headers."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest
from gateway_requests import address

from warmd.daemon.gateway.http.auth import SILENCE_S
from warmd.daemon.gateway.http.connection import HEAD_S


def test_a_request_with_too_large_a_content_length_is_refused_at_once(gateway):
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-length: 99999999999\r\n\r\n"
    )
    with socket.create_connection(address(gateway)) as line:
        line.sendall(head)
        assert line.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("is_announced", [True, False])
def test_client_that_sends_too_much_receives_the_413(gateway, is_announced):
    parts = [b'{"model": "tiny", "prompt": "', *[b"x" * 2**20] * 70]
    content = b"".join(parts) if is_announced else iter(parts)
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{gateway.url}/v1/completions", content=content, headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    "headers",
    [
        {"x-stainless-retry-count": "9" * 5000},
        {"x-stainless-read-timeout": "nan"},
        {"idempotency-key": ""},
    ],
)
def test_nonsense_header_does_not_make_the_gateway_fail(gateway, headers):
    answer = httpx.post(f"{gateway.url}/v1/completions", json={}, headers=headers)
    assert answer.status_code == 400


UNFINISHED = {  # what a client sends before it stops: when it is disconnected
    b"": HEAD_S,
    b"POST /v1/completions HTTP/1.1\r\nHost: loc": HEAD_S,
    # After a response, uvicorn's shorter limit applies.
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\nGET /v1": 5,
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{": SILENCE_S,
}


@pytest.mark.nightly(
    part="clients",
    catches="a client that stops in the middle of a request and keeps its connection",
)
def test_clients_that_stop_in_the_middle_of_a_request_are_disconnected(gateway):
    def stop(sent: bytes) -> tuple[float, bytes]:
        with socket.create_connection(address(gateway), timeout=max(UNFINISHED.values()) + 5) as s:
            s.sendall(sent)
            begun, received = time.monotonic(), b""
            while got := s.recv(4096):
                received += got
            return time.monotonic() - begun, received

    with ThreadPoolExecutor(len(UNFINISHED)) as pool:
        ends = list(pool.map(stop, UNFINISHED))
    for (seconds, received), limit_s in zip(ends, UNFINISHED.values(), strict=True):
        assert seconds == pytest.approx(limit_s, abs=2)
        assert (b"HTTP/1.1 408" in received) == (limit_s == SILENCE_S)
