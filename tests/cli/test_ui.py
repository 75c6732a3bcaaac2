"""`warmd ui`: the address of the dashboard."""

from __future__ import annotations

import pytest
from shell import warmd

from warmd.cli.commands.ui import tunnel_of

SSH = "203.0.113.7 50022 198.51.100.1 "


@pytest.mark.parametrize("setting", ["http_port", "http_page"])
def test_ui_names_the_setting_that_switches_the_dashboard_off(tmp_path, setting):
    (tmp_path / "config.yaml").write_text(f"{setting}: off\n")
    done = warmd("ui", home=tmp_path)
    assert done.err == f"Error: {setting}: must not be off for the dashboard\n"


def test_ui_prints_the_address(shared_daemon):
    done = warmd("ui", home=shared_daemon.home.path)
    assert done.out == f"{shared_daemon.status()['http']['url']}/\n"


def test_in_an_ssh_session_ui_prints_the_command_for_a_tunnel():
    address = "http://127.0.0.1:8421/"
    environ = {"SSH_CONNECTION": f"{SSH}22", "USER": "ada"}
    assert tunnel_of(address, environ) == "ssh -N -L 8421:127.0.0.1:8421 ada@198.51.100.1"
    environ["SSH_CONNECTION"] = f"{SSH}2222"
    assert tunnel_of(address, environ) == "ssh -p 2222 -N -L 8421:127.0.0.1:8421 ada@198.51.100.1"
    assert tunnel_of(address, {}) is None
