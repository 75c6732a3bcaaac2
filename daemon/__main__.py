"""Run a daemon in the background: `python -m warmd.daemon`; reads its config as JSON from stdin.

Writes the progress of the start to stdout, one message (host/messages.py) per line.
"""

from __future__ import annotations

import contextlib
import os
import sys

import orjson

from ..configs.config import DaemonConfig
from .host.messages import Message, encode
from .supervise.guardian import guard


def _report(message: Message) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, encode(message))


if __name__ == "__main__":
    config = DaemonConfig.from_json(orjson.loads(sys.stdin.buffer.read()))
    sys.exit(guard(config, report=_report, foreground=False))
