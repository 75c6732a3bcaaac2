"""Agents for tests that are programs of frameworks, in environments of their own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

PYTHON = "FRAMEWORK_PYTHON"  # variables: of the environment, and the name of the script
SCRIPT = "FRAMEWORK_SCRIPT"
SCRIPTS = Path(__file__).parents[1] / "environments" / "frameworks"


def framework(task: dict[str, Any]) -> float:
    """The number of turns that the program has asked for."""
    command = [os.environ[PYTHON], str(SCRIPTS / f"{os.environ[SCRIPT]}.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return float(json.loads(done.stdout.splitlines()[-1])["turns"])
