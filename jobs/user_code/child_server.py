"""The child's end of `child.Child`: answers requests until the parent has closed its end."""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

Answer = Callable[[dict[str, Any]], Mapping[str, Any]]

# Limit of a process's data; with the code of its libraries it has less than 200 MB.
MEMORY_BYTES = 144 << 20


def parent() -> socket.socket:
    """Return the socket that `child.SpawnedChild` named to this process."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)  # a program that outlives this process would keep it open
    return connection


def serve(answer: Answer, connection: socket.socket) -> None:
    """Answer requests, one at a time, until the parent has closed its end."""
    with suppress(ConnectionError), connection, connection.makefile("rb") as requests:
        for line in requests:
            connection.sendall(encoded(answer(json.loads(line))))


def serve_within_limits(answer: Answer, memory_bytes: int = MEMORY_BYTES) -> None:
    """Report that this process is ready; then `serve`, with limits on memory and on time.

    The limits on time are in each request (`limit_s`, `processor_s`, see limited_processes). An
    answer has `is_last` if this process has grown: what it retains may leave too little memory for
    the next request.
    """
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, most))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the requesting process

    def limited(request: dict[str, Any]) -> Mapping[str, Any]:
        # Ends this process if its parent is gone, even within one operation.
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
        signal.setitimer(signal.ITIMER_PROF, request["processor_s"])
        found = answer(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        return {**found, "is_last": _peak_bytes() > memory_bytes // 2}

    connection = parent()
    connection.sendall(encoded({}))
    serve(limited, connection)


def encoded(message: Mapping[str, Any]) -> bytes:
    """Return a message as a line of JSON in ASCII: a text may have half of a surrogate pair."""
    return json.dumps(message, default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Return a number or an array of a library as numbers, and a date as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _peak_bytes() -> int:
    """The most resident memory of this process; 0 outside Linux.

    That of getrusage includes what the parent had.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
