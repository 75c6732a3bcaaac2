"""The loop of a process of limited_processes: answers requests within a limit on its memory."""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Limit of a process's data; with the code of its libraries it has less than 200 MB.
MEMORY_BYTES = 144 << 20


def serve(
    answer: Callable[[dict[str, Any]], dict[str, Any]], memory_bytes: int = MEMORY_BYTES
) -> None:
    """Answer requests until stdin ends, or until this process has grown."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, most))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the requesting process
    _reply("{}")
    for line in sys.stdin:
        request = json.loads(line)
        # Ends this process if its parent is gone, even within one operation.
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
        signal.setitimer(signal.ITIMER_PROF, request["processor_s"])
        found = answer(request)
        # Memory that it retains may leave too little for the next request.
        has_grown = _peak_bytes() > memory_bytes // 2
        text = json.dumps(found | {"is_last": has_grown})
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(text)
        if has_grown:
            return


def _reply(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _peak_bytes() -> int:
    """The most resident memory of this process; 0 outside Linux.

    That of getrusage includes what the parent had.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
