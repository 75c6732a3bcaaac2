"""Shared by the children of `peers.py`: one runtime with one model, driven by lines of JSON.

A child first prints `{"ready": WORDS}` or `{"error": LINE}`. Each request `{"prompts": [[ID, ...]],
"tokens": N}` is answered by an Answer. Only this protocol goes to stdout: what a runtime prints
itself goes to stderr. Standard library only: the peers' environment has little else.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

THREADS = 2
MOST_SEQUENCES = 16  # of one burst


@dataclass(frozen=True)
class Memory:
    """Resident memory of a process, in bytes."""

    anonymous: int = 0
    files: int = 0  # pages of mapped files
    shared: int = 0  # the part of both that other processes have mapped too


@dataclass(frozen=True)
class Answer:
    """One burst: `tokens` new tokens for each prompt, greedily, with no early end.

    Seconds are counted from the moment in which the runtime was given all prompts.
    """

    first_s: list[float]  # when each sequence had its first token
    last_s: list[float]  # and its last one
    texts: list[str]  # what each sequence generated
    peak_bytes: int = 0  # most resident memory of the process until now, mapped files included
    memory: Memory = Memory()


Burst = Callable[[Sequence[Sequence[int]], int], Answer]


def serve(start: Callable[[], tuple[str, Burst]]) -> None:
    """Start the runtime, which returns words about itself, and answer until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        words, burst = start()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        replies.write(json.dumps({"error": f"{type(error).__name__}: {lines[0]}"}) + "\n")
        raise
    replies.write(json.dumps({"ready": words}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        answer = burst(request["prompts"], request["tokens"])
        measured = replace(answer, peak_bytes=_peak_bytes(), memory=_memory())
        replies.write(json.dumps(asdict(measured)) + "\n")
    replies.flush()
    os._exit(0)  # runtimes differ in how well they end their threads


def _peak_bytes() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status["VmHWM"].split()[0])


def _memory() -> Memory:
    _, *lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    found = {name: 1024 * int(kilobytes) for name, kilobytes, _ in map(str.split, lines)}
    anonymous = found["Anonymous:"]
    shared = found["Shared_Clean:"] + found["Shared_Dirty:"]
    return Memory(anonymous, found["Rss:"] - anonymous, shared)
