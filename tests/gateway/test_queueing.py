"""Requests that wait: queue positions, and a full queue."""

from __future__ import annotations

from functools import partial

import httpx2 as httpx
import openai
import pytest
from gateway_requests import raw_ask, refusal, request
from gateways import Gateway
from waiting import wait_until


def waits(gateway: Gateway, number: int) -> bool:
    return len(gateway.waiting()) == number


def test_response_headers_have_job_and_queue_position(gateway, background):
    for n in range(2):
        background.submit(raw_ask, gateway, f"{n}")
        wait_until(partial(waits, gateway, n + 1))
    third = background.submit(raw_ask, gateway, "third")
    wait_until(lambda: len(gateway.waiting()) == 3)
    for n in range(3):
        gateway.take().finish(f"{n}")
    headers = third.result(10).headers
    assert headers["x-warmd-position"] == "3"
    assert headers["x-warmd-job"].startswith("infer-")


def test_waiting_stream_sends_its_queue_position_in_comments(gateway):
    ahead = iter(request(gateway, stream=True))
    body = {"model": "tiny", "prompt": "2", "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=10) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith(":")).startswith(": position 2")
        gateway.take().finish("x")
        list(ahead)
        assert next(line for line in lines if line.startswith(":")).startswith(": position 1")
        gateway.take().finish("x")
        assert list(lines)[-2] == "data: [DONE]"


def test_full_queue_is_429_with_retry_after(gateway, background):
    for n in range(4):
        background.submit(raw_ask, gateway, f"{n}")
        wait_until(partial(waits, gateway, n + 1))
    with pytest.raises(openai.RateLimitError) as caught:
        request(gateway)
    status, error = refusal(caught.value)
    assert (status, error["code"]) == (429, "queue_full")
    assert int(caught.value.response.headers["retry-after"]) >= 1
    for _ in range(4):
        gateway.take().finish("x")
