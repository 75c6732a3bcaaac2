"""A job that the kernel kills for its memory: it fails with the reason, and others run."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from daemons import Daemon
from process_limits import memory_limit


@pytest.mark.slow
def test_a_job_that_takes_too_much_memory_fails_by_name_and_others_finish(
    sturdy: Daemon, tmp_path: Path
):
    with memory_limit(f"warmd-{tmp_path.name}", 300_000_000) as add:
        zygote = psutil.Process(sturdy.pid("zygote"))
        add(zygote.pid)
        for standby in zygote.children(recursive=True):
            add(standby.pid)
        greedy, following = sturdy.submit("behaviours:devours"), sturdy.submit()
        failed = sturdy.wait(greedy)
        assert (failed["status"], failed["execution"]) == ("failed", 3)
        assert "killed by SIGKILL, perhaps out of memory: peak" in failed["error"]
        assert sturdy.wait(following)["status"] == "finished"
        sturdy.stop()
