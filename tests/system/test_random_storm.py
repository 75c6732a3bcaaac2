"""A minute of random kills, of every process of the daemon, loses nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from needs import needs

SCRIPT = Path(__file__).parents[1] / "support" / "random_storm.py"
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")


@pytest.mark.nightly(
    part="storms",
    catches="jobs lost by kills of random processes at random times",
)
@pytest.mark.timeout(500)
def test_a_minute_of_random_kills_loses_nothing():
    needs(shutil.which("unshare"), "unshare")
    is_allowed = subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0
    # Without root, a PID namespace needs a user namespace around it.
    namespace = NAMESPACE if is_allowed else (*NAMESPACE, "--user", "--map-root-user")
    done = subprocess.run(
        [*namespace, sys.executable, str(SCRIPT), "--seconds", "60", "--jobs", "20"],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "nothing lost: 20 jobs", done.stdout + done.stderr
