"""Hostile requests: /health responds in time, and memory stays bounded."""

from __future__ import annotations

import base64
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
from gateways import Gateway
from waiting import wait_until
from watch import Watch

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def gateway(tiny_model: Path) -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        gateway = Gateway(Path(folder, "home"), tiny_model, http_queue_limit=1000)
        yield gateway
        gateway.close()


def post(gateway: Gateway, body: bytes, path: str = CHAT) -> int | None:
    """Send a body; return the status of the response, None where none comes in 10 s."""
    headers = {"content-type": "application/json"}
    try:
        with httpx.Client(verify=False, trust_env=False) as client:
            return client.post(
                gateway.url + path, content=body, headers=headers, timeout=10
            ).status_code
    except httpx.TransportError:
        return None


def chat(messages: str, more: str = "") -> bytes:
    return f'{{"model":"tiny","max_tokens":2,"messages":{messages}{more}}}'.encode()


def listed(item: str, size: int) -> str:
    return "[" + ",".join([item] * (size // (len(item) + 1))) + "]"


def image_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


HOSTILE: dict[str, Callable[[int], bytes]] = {
    "wrong items": lambda size: chat(listed("0", size)),
    "empty objects": lambda size: chat(listed("{}", size)),
    "unknown members": lambda size: chat(
        "[]", "".join(f',"x{n}":0' for n in range(size // 10))
    ),
    "deep lists": lambda size: chat("[" * size),
    "deep objects": lambda size: chat('{"a":' * (size // 5)),
    "long text": lambda size: chat('[{"role":"user","content":"' + "a" * size + '"}]'),
    "escapes": lambda size: chat('[{"role":"user","content":"' + r"\"" * (size // 2) + '"}]'),
    "many stops": lambda size: chat("[]", ',"stop":' + listed('"a"', size)),
    "many parts": lambda size: chat(
        '[{"role":"user","content":' + listed('{"type":"text","text":""}', size) + "}]"
    ),
    "huge schema": lambda size: chat(
        '[{"role":"user","content":"a"}]',
        ',"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"enum":'
        + listed('"a"', size) + "}}}",
    ),
    "no JSON": lambda size: b"[" * size,
    "images": lambda size: chat(
        '[{"role":"user","content":[{"type":"image_url","image_url":{"url":"'
        + image_url(b"x" * (size * 3 // 4)) + '"}}]}]'
    ),
    "commas behind an image": lambda size: chat(listed('"data:image"', 20)[:-1] + "," * size),
}  # fmt: skip


VALID = ("long text", "escapes", "huge schema")  # they wait for an answer, up to a size


@pytest.mark.slow
def test_malformed_list_is_refused_at_its_first_item_without_blocking_other_requests(gateway):
    with Watch(gateway) as watch:
        begun = time.monotonic()
        for size in (1_000_000, 7_000_000) * 4:
            assert post(gateway, HOSTILE["wrong items"](size)) == 400
        assert time.monotonic() - begun < 10
    watch.check()


@pytest.mark.slow
@pytest.mark.parametrize("attack", [name for name in HOSTILE if name not in VALID])
def test_hostile_body_is_refused_in_one_line(gateway, attack):
    headers = {"content-type": "application/json"}
    body = HOSTILE[attack](200_000)
    answer = httpx.post(gateway.url + CHAT, content=body, headers=headers)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.nightly(
    part="clients",
    catches="memory or delays that grow only with hundreds of hostile requests",
)
@pytest.mark.parametrize(
    ("attack", "size"),
    [*((attack, 7_000_000) for attack in HOSTILE), ("wrong items", 60_000_000)],
)
def test_hundreds_of_hostile_requests_block_nobody_and_memory_stays_bounded(gateway, attack, size):
    body = HOSTILE[attack](size)
    with Watch(gateway) as watch, ThreadPoolExecutor(200) as attackers:
        statuses = Counter(attackers.map(lambda _: post(gateway, body), range(200)))
    wait_until(lambda: gateway.waiting() == [])  # the waiting clients are gone
    assert not {200, 500} & statuses.keys()
    watch.check()
