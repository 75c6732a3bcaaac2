"""Random cuts, power losses and suspensions of three machines lose nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from machines import check_tools

SCRIPT = Path(__file__).parents[1] / "support" / "network_storm.py"
NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.mark.nightly(
    part="networks",
    catches="a job lost or run twice after several faults of links, power and clocks at once",
)
@pytest.mark.timeout(900)  # the script gives up by itself, when nothing ends for minutes
def test_random_faults_of_three_machines_lose_nothing():
    check_tools()
    done = subprocess.run(
        [*NAMESPACE, sys.executable, str(SCRIPT), "--seconds", "30", "--jobs", "9"],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "nothing lost: 9 jobs", done.stdout + done.stderr
