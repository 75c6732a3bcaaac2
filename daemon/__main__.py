"""Run a daemon in the background: `python -m warmd.daemon`, its config on stdin as JSON.

Progress goes to stdout, one JSON object a line, until the workers are warm.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import orjson

from ..configs.config import DaemonConfig
from .supervise.guardian import guard


def _report(message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, orjson.dumps(message) + b"\n")


if __name__ == "__main__":
    config = DaemonConfig.from_json(orjson.loads(sys.stdin.buffer.read()))
    sys.exit(guard(config, report=_report, foreground=False))
