"""The units of systemd."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from needs import needs

from warmd.configs.config import DaemonConfig

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
SECONDS = {"": 1, "s": 1, "min": 60}


def setting(unit: str, name: str) -> str:
    found = re.findall(rf"^{name}=(.*)$", unit, re.MULTILINE)
    assert len(found) == 1
    return str(found[0])


def seconds(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([a-z]*)", text).groups()  # type: ignore[union-attr]
    return int(number) * SECONDS[unit]


@pytest.mark.parametrize("kind", ["system", "user"])
def test_systemd_accepts_the_unit(kind, tmp_path):
    needs(shutil.which("systemd-analyze"), "systemd-analyze (systemd)")
    unit = (UNITS / kind / "warmd.service").read_text()
    # The program need not be installed where the tests run.
    program = re.sub(r"^(ExecStart=)\S+", rf"\g<1>{sys.executable}", unit, flags=re.MULTILINE)
    path = tmp_path / "warmd.service"
    path.write_text(program)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", f"--{kind}", str(path)],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("kind", ["system", "user"])
def test_the_unit_waits_until_jobs_have_saved_and_restarts_a_daemon_that_hangs(kind, tmp_path):
    unit = (UNITS / kind / "warmd.service").read_text()
    assert seconds(setting(unit, "TimeoutStopSec")) > DaemonConfig(home=tmp_path).stop_grace_s
    assert setting(unit, "Type") == "notify"
    assert setting(unit, "Restart") == "on-failure"  # the watchdog counts as one
    # The main loop may wait a minute each for the lock of the embedded Redis and for its replies.
    assert seconds(setting(unit, "WatchdogSec")) > 120
