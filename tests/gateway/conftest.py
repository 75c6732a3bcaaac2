"""A gateway for the tests of this folder, which act as its worker; started once for all files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tool_chats
from gateway_requests import PUBLIC, TOKEN
from gateways import Gateway


@pytest.fixture(scope="package")
def one_gateway(tiny_model: Path) -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        gateway = Gateway(Path(folder, "home"), tiny_model, http_queue_limit=4)
        yield gateway
        gateway.close()


@pytest.fixture
def gateway(one_gateway: Gateway) -> Iterator[Gateway]:
    """A gateway whose queue is empty."""
    if one_gateway.process.poll() is not None:
        one_gateway.start()
    yield one_gateway
    one_gateway.hang_up()
    one_gateway.drop_waiting()


@pytest.fixture(scope="package")
def locked(tiny_model: Path) -> Iterator[Gateway]:
    """A gateway with a token, and a public origin at a TLS proxy."""
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        made = Gateway(Path(folder, "home"), tiny_model, http_token=TOKEN, http_origin=(PUBLIC,))
        yield made
        made.close()


@pytest.fixture
def make_gateway(tiny_model: Path) -> Iterator[Callable[..., Gateway]]:
    made: list[Gateway] = []
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:

        def make(**settings: Any) -> Gateway:
            made.append(Gateway(Path(folder, f"h{len(made)}"), tiny_model, **settings))
            return made[-1]

        yield make
        for gateway in made:
            gateway.close()


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(scope="module")
def thinking(tiny_model: Path) -> Iterator[Gateway]:
    """A gateway whose model has the chat template of Qwen3."""
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:  # a short path, for sockets
        made = Gateway(Path(folder, "home"), tiny_model)
        template = Path(made.config.models[0].path, "chat_template.jinja")
        template.write_text(tool_chats.source_of("qwen3"))
        yield made
        made.close()
