"""A browser and a daemon for the tests of the dashboard; started once for all files."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, has_chromium
from daemons import Daemon
from dashboard import Page, finished
from gateways import Gateway
from needs import needs
from ports import free_port
from waiting import wait_until

from warmd.configs.config import WorkerConfig


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    needs(has_chromium(), "chromium and chromedriver")
    made = Browser()
    yield made
    made.close()


@pytest.fixture(scope="package")
def daemon(daemons: Callable[..., Daemon]) -> Iterator[Daemon]:
    started = daemons(
        http_port=free_port(),  # at which the page finds a restarted gateway
        workers=(
            WorkerConfig(name="train-0", queue="train", threads=1),
            WorkerConfig(name="infer-0", queue="infer", isolation="resident", slots=4, threads=1),
        ),
    )
    started.start()
    yield started
    started.close()


@pytest.fixture
def page(browser: Browser, daemon: Daemon) -> Iterator[Page]:
    wait_until(lambda: daemon.status()["http"]["url"], timeout_s=30)
    browser.resize(1280)
    yield Page(browser, daemon.status()["http"]["url"])
    browser.open("about:blank")
    daemon.leave_idle()
    browser.problems()


@pytest.fixture(scope="package")
def jobs_of_all_states(daemon: Daemon) -> list[str]:
    return [finished(daemon), finished(daemon)]


@pytest.fixture
def make_gateway(tiny_model: Path) -> Iterator[Callable[..., Gateway]]:
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder, contextlib.ExitStack() as stack:

        def make(**settings: Any) -> Gateway:
            gateway = Gateway(Path(folder, "home"), tiny_model, **settings)
            stack.callback(gateway.close)
            return gateway

        yield make
