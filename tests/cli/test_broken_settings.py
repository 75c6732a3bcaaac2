"""A settings file in the home that cannot be read is named, and keeps nobody from stopping."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Daemon
from shell import warmd

BROKEN = {
    "not YAML": b"models: [",
    "a wrong key": b"modles: []\n",
    "a wrong value": b"http_port: x\n",
    "not text": b"\xff\xfe",
}


@pytest.fixture
def stoppable(sturdy: Daemon) -> Iterator[Daemon]:
    """A running daemon; the settings file in its home is removed afterwards."""
    yield sturdy
    (sturdy.home.path / "config.yaml").unlink(missing_ok=True)


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_commands_name_a_broken_settings_file_in_one_line(tmp_path: Path, content: bytes):
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    for command in ("status", "queue", "start"):
        done = warmd(command, home=tmp_path)
        assert done.is_refusal(2)
        assert str(path) in done.err


@pytest.mark.slow
def test_a_daemon_is_stopped_despite_a_broken_settings_file(stoppable: Daemon):
    path = stoppable.home.path / "config.yaml"
    path.write_bytes(BROKEN["not YAML"])
    done = warmd("stop", home=stoppable.home.path)
    assert (done.code, done.out) == (0, "stopped\n")
    assert done.err.startswith(f"not read: {path}:1: is not right YAML")
    assert not stoppable.home.is_locked()
    done = warmd("stop", home=stoppable.home.path)
    assert done.code == 3
    assert "no daemon runs" in done.err


def test_stop_does_not_ignore_a_mistake_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "other.yaml").write_bytes(BROKEN["not YAML"])
    monkeypatch.setenv("WARMD_CONFIG", str(tmp_path / "other.yaml"))
    done = warmd("stop", home=tmp_path / "home")
    assert done.is_refusal(2)
    assert "other.yaml:1" in done.err
