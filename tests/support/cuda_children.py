"""Child processes in which torch looks like a build with CUDA (`fake_cuda.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from warmd.daemon.fork.libraries import ENVIRONMENT


def child(code: str, *args: str, **environ: str) -> list[str]:
    """Run code in a process with faked CUDA; return the lines that it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *args],
        env={
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": str(Path(__file__).parent),
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
