"""Requests to a gateway, by OpenAI's client, as plain HTTP and as bytes."""

from __future__ import annotations

import base64
import contextlib
import io
import socket
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import openai
import orjson
from gateways import Gateway
from PIL import Image

TOKEN = "a-token-of-tests"
PUBLIC = "https://warmd.test"  # where a TLS proxy would be
OURS = {"x-warmd": "1"}  # a change below /v1/warmd/


def request(gateway: Gateway, prompt: str = "1", **options: Any) -> Any:
    settings = options.pop("settings", {})
    return gateway.openai(**settings).completions.create(model="tiny", prompt=prompt, **options)


def raw_ask(gateway: Gateway, prompt: str = "1", **headers: str) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{gateway.url}/v1/completions", json=body, headers=named, timeout=30)


def refusal(error: openai.APIStatusError) -> tuple[int, Any]:
    """Return status and `error` of a response in OpenAI's shape."""
    body = error.response.json()["error"]
    assert body.keys() == {"message", "type", "param", "code"}
    return error.status_code, body


@contextlib.contextmanager
def connection(gateway: Gateway, body: str, **headers: str) -> Iterator[socket.socket]:
    """Send a request; leaving the context disconnects."""
    host, port = address(gateway)
    named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection((host, port)) as line:
        line.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\ncontent-type: application/json\r\n"
            f"{named}content-length: {len(body)}\r\n\r\n{body}".encode()
        )
        yield line


def address(gateway: Gateway) -> tuple[str, int]:
    host, port = gateway.url.removeprefix("http://").split(":")
    return host, int(port)


def metrics(gateway: Gateway) -> dict[str, float]:
    lines = httpx.get(f"{gateway.url}/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def image_url(width: int, height: int) -> str:
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def openai_messages(text: str) -> Any:
    """Return the messages in the spec of a job."""
    return orjson.loads(text)
