"""`warmd start` without a terminal: the output that scripts and logs get."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ports import free_port
from shell import CLEAN_ENVIRON


@pytest.mark.slow
def test_a_start_that_is_piped_tells_the_address(tiny_model: Path):
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        port = free_port()
        settings = f"models: [tiny={tiny_model}]\nhttp_port: {port}\n"
        Path(folder, "config.yaml").write_text(settings)

        def run(*words: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "warmd.cli", *words]
            environ = {**CLEAN_ENVIRON, "WARMD_HOME": folder}
            return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)

        started = run("start")
        try:
            assert started.returncode == 0
            assert f"HTTP API: http://127.0.0.1:{port}/v1\n" in started.stderr
            again = run("start", "--model", f"other={tiny_model}")
            assert again.returncode == 2
            assert (
                f"to load a model into the running daemon: warmd load other={tiny_model}"
                in again.stderr
            )
        finally:
            assert run("stop").returncode == 0
