"""Processes with limits: one that cannot be started is an error with its cause, and is not left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from warmd.jobs.errors import Unavailable
from warmd.jobs.user_code.limited_processes import LimitedProcesses


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


@pytest.mark.slow
def test_a_process_that_does_not_start_is_named_and_ended():
    before = children()
    with pytest.raises(Unavailable, match=r"the process of warmd\.no_such_module does not start"):
        LimitedProcesses("warmd.no_such_module").answer({}, limit_s=1.0)
    assert children() == before
