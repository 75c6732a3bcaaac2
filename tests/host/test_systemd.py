"""What systemd is told."""

from __future__ import annotations

import os
import socket

import pytest

from warmd.daemon.host.systemd import READY, notify


@pytest.mark.parametrize("is_abstract", [False, True])
def test_systemd_receives_the_state(tmp_path, monkeypatch, is_abstract):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        name = f"warmd-test-{os.getpid()}" if is_abstract else str(tmp_path / "s")
        receiver.bind(f"\0{name}" if is_abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}" if is_abstract else name)
        notify(READY)
        receiver.settimeout(5)
        assert receiver.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", [None, "", "vsock:2:3", "/nonexistent/socket"])
def test_without_systemd_nothing_happens(monkeypatch, address):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify(READY)
