"""Notifications to systemd, over its real protocol."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import psutil
import pytest
from shell import CLEAN_ENVIRON
from waiting import holds_for, wait_until

from warmd.configs.config import DaemonConfig
from warmd.daemon.host.home import Home
from warmd.daemon.host.systemd import READY, ServiceManager


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket of a systemd."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "s"))
        bound.settimeout(20)
        yield bound


def received(receiver: socket.socket) -> list[str]:
    """What has arrived so far."""
    found = []
    receiver.setblocking(False)
    try:
        while True:
            found.append(receiver.recv(100).decode())
    except BlockingIOError:
        return found
    finally:
        receiver.settimeout(20)


@pytest.mark.parametrize("is_abstract", [False, True])
def test_systemd_receives_the_state(tmp_path, is_abstract):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        name = f"warmd-test-{os.getpid()}@x" if is_abstract else str(tmp_path / "s")
        receiver.bind(f"\0{name}" if is_abstract else name)
        environ = {"NOTIFY_SOCKET": f"@{name}" if is_abstract else name}
        ServiceManager.from_environ(environ).notify(READY)
        receiver.settimeout(5)
        assert receiver.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", [None, "", "vsock:2:3", "/nonexistent/socket"])
def test_without_systemd_nothing_happens(address):
    environ = {} if address is None else {"NOTIFY_SOCKET": address}
    ServiceManager.from_environ(environ).notify(READY)


def test_a_systemd_that_does_not_read_does_not_block(receiver, tmp_path):
    manager = ServiceManager(str(tmp_path / "s"), None)
    begun = time.monotonic()
    for _ in range(10_000):  # more than its queue holds
        manager.notify(READY)
    assert time.monotonic() - begun < 10
    assert set(received(receiver)) == {READY}


@pytest.mark.parametrize(
    ("period_us", "pid", "is_watched"),
    [
        (None, None, False),
        ("0", None, False),
        ("soon", None, False),
        ("60000000", None, True),
        ("60000000", "this process", True),
        ("60000000", "1", False),  # the watchdog of a service that started this process
    ],
)
def test_the_watchdog_is_pinged_if_it_watches_this_process(
    receiver, tmp_path, period_us, pid, is_watched
):
    pid = str(os.getpid()) if pid == "this process" else pid
    given = {"WATCHDOG_USEC": period_us, "WATCHDOG_PID": pid}
    environ = {name: text for name, text in given.items() if text is not None}
    manager = ServiceManager.from_environ({**environ, "NOTIFY_SOCKET": str(tmp_path / "s")})
    for _ in range(3):
        manager.ping_if_due()
    assert received(receiver) == ["WATCHDOG=1"] * is_watched


def test_jobs_do_not_inherit_the_variables():
    environ = {"NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "HOME": "/h"}
    ServiceManager.from_environ(environ)
    assert environ == {"HOME": "/h"}


@pytest.mark.slow
def test_a_daemon_is_ready_pings_while_its_main_loop_runs_and_reports_its_end(
    receiver, tmp_path_factory, tmp_path
):
    home = Home(tmp_path_factory.mktemp("home"))
    config = DaemonConfig(home=home.path, models=(), workers=(), http_port=None)
    daemon = subprocess.Popen(
        [sys.executable, "-m", "warmd.daemon"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # A ping is due every second: in each iteration of the main loop.
        env={**CLEAN_ENVIRON, "NOTIFY_SOCKET": str(tmp_path / "s"), "WATCHDOG_USEC": "3000000"},
    )
    assert daemon.stdin is not None
    daemon.stdin.write(orjson.dumps(config.to_json()))
    daemon.stdin.close()
    try:
        assert receiver.recv(100) == b"READY=1"
        assert receiver.recv(100) == b"WATCHDOG=1"
        assert receiver.recv(100) == b"WATCHDOG=1"
        state = home.read_state()
        assert state is not None
        os.kill(state["pid"], signal.SIGSTOP)  # the supervisor hangs
        wait_until(lambda: psutil.Process(state["pid"]).status() == psutil.STATUS_STOPPED)
        received(receiver)  # pings from before
        holds_for(2.5, lambda: received(receiver) == [])  # two pings are a second apart
        os.kill(state["pid"], signal.SIGCONT)
        assert receiver.recv(100) == b"WATCHDOG=1"
        daemon.terminate()
        states: list[str] = []

        def is_stopping() -> bool:
            states.extend(received(receiver))
            return "STOPPING=1" in states

        wait_until(is_stopping)
        assert daemon.wait(20) == 0
    finally:
        daemon.kill()
        daemon.wait()
