"""Other versions of RQ than the installed one, for processes that get them by PYTHONPATH."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from needs import needs

from warmd.daemon.queue import rq_format

IS_3 = rq_format.VERSION.startswith("3.")
OLDER, NEWER = "2.11.0", "3.0.0"  # both ends of what pyproject.toml allows
PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")
OTHER = OLDER if IS_3 else NEWER

_made: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


@cache
def other_rq(version: str = OTHER) -> Path:
    """Return a folder with a version of RQ, which pip installs there."""
    _made.append(tempfile.TemporaryDirectory(prefix="warmd-rq-"))
    folder = Path(_made[-1].name)
    done = subprocess.run(
        [*PIP, "--target", str(folder), f"rq=={version}"],
        check=False,
        capture_output=True,
        timeout=120,
    )
    needs(done.returncode == 0, f"a package index with rq {version}")
    assert run_python("import rq; print(rq.VERSION)", source=folder) == version
    return folder


def run_python(program: str, *arguments: str, source: Path, **environment: str) -> str:
    """Run a program with what is in a folder, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": str(source), **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
