"""`warmd probe` and the gateway's probes, for Kubernetes and containers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import orjson
import pytest
from gateways import Gateway
from shell import CLEAN_ENVIRON, warmd
from waiting import wait_until

from warmd.configs.config import DaemonConfig
from warmd.daemon.host.home import Home


@contextlib.contextmanager
def running(config: DaemonConfig) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon that starts."""
    daemon = subprocess.Popen(
        [sys.executable, "-m", "warmd.daemon"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=CLEAN_ENVIRON,
    )
    assert daemon.stdin is not None
    daemon.stdin.write(orjson.dumps(config.to_json()))
    daemon.stdin.close()
    try:
        yield daemon
    finally:
        daemon.terminate()
        daemon.wait(30)


@pytest.fixture
def home() -> Iterator[Home]:
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        yield Home(Path(folder))


@pytest.mark.slow
def test_a_daemon_is_live_and_ready_until_it_hangs_or_ends(home: Home):
    assert warmd("probe", "live", home=home.path).is_refusal(3)
    config = DaemonConfig(home=home.path, models=(), workers=(), http_port=None)
    with running(config):
        wait_until(lambda: warmd("probe", "ready", home=home.path).code == 0, timeout_s=30)
        live = warmd("probe", "live", "--json", home=home.path)
        assert (live.code, live.objects) == (0, [{"live": True}])
        state = home.read_state()
        assert state is not None
        os.kill(state["pid"], signal.SIGSTOP)
        hung = warmd("probe", "live", home=home.path)
        os.kill(state["pid"], signal.SIGCONT)
        assert hung.is_refusal(3)
        assert "does not reply" in hung.err
    assert warmd("probe", "live", home=home.path).is_refusal(3)


@pytest.mark.slow
def test_a_daemon_that_loads_its_libraries_is_live_and_not_ready(home: Home):
    config = DaemonConfig(home=home.path, http_port=None)
    with running(config):
        wait_until(lambda: warmd("probe", "live", home=home.path).code == 0, timeout_s=30)
        starting = warmd("probe", "ready", home=home.path)
        assert starting.is_refusal(3)
        assert "takes no jobs" in starting.err


@pytest.mark.slow
def test_the_gateway_is_live_without_redis_and_ready_with_it(home: Home, tiny_model: Path):
    gateway = Gateway(home.path / "home", tiny_model, http_token="x" * 16)
    try:
        # Without the token, which the probes of Kubernetes cannot have.
        assert httpx.get(f"{gateway.url}/livez").status_code == 200
        assert httpx.get(f"{gateway.url}/readyz").status_code == 200
        assert httpx.get(f"{gateway.url}/health").status_code == 503  # no worker is ready
        gateway.server.stop()
        assert httpx.get(f"{gateway.url}/livez").status_code == 200
        assert httpx.get(f"{gateway.url}/readyz", timeout=60).status_code == 503
        assert gateway.server.process is not None
    finally:
        gateway.close()
