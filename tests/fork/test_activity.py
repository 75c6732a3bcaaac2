"""Reports of a job's activity."""

from __future__ import annotations

import subprocess
import sys

import pytest
from process_limits import process_limit

REPORT = """
import sys
from warmd.daemon.fork.activity import ActivityReporter

sys.stdin.readline()  # until this process is limited
with ActivityReporter(print) as reporter:
    try:
        reporter.working(None)
    except RuntimeError as error:
        print(error)
print("ended")
"""


@pytest.mark.slow
def test_a_reporter_for_which_no_thread_is_free_ends_and_hides_no_error():
    with process_limit("warmd-activity") as limit:
        child = subprocess.Popen(
            [sys.executable, "-c", REPORT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        limit.add(child.pid)
        limit.set(more=0)
        printed, _ = child.communicate("\n", timeout=60)
        assert printed.splitlines() == ["can't start new thread", "ended"]
        assert child.returncode == 0
