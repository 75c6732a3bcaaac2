"""Work stealing: each thread computes the tasks of its own range, then takes tasks from others.

Threads differ in speed: cores differ, and the kernel may give one to another process at any time.
"""

from __future__ import annotations

from typing import Any

from .compiling import compiled
from .intrinsics import call, fetch_add, words
from .rowwise import WORD

_FROM_END = 1 << 32
_FROM_BEGIN = _FROM_END - 1


@compiled
def claim(count: Any, thread: Any, threads: Any, claimed: Any) -> Any:
    """Claim one of `count` tasks; return its number, or -1 if none is left.

    `claimed`: a word per thread, initially 0. It counts the claimed tasks of the thread's range:
    from the start by the thread itself (lower 32 bits), from the end by others (upper 32 bits).
    """
    for offset in range(threads):
        owner = (thread + offset) % threads
        begin, end = count * owner // threads, count * (owner + 1) // threads
        place = claimed + owner * WORD
        before = words(place)[0]  # read first: a failed claim must not count
        if begin + (before & _FROM_BEGIN) < end - (before >> 32):
            before = fetch_add(place, 1 if owner == thread else _FROM_END)
            first, last = begin + (before & _FROM_BEGIN), end - (before >> 32) - 1
            if first <= last:
                return first if owner == thread else last
    return -1


@compiled
def wait_for_all(barrier: Any, claimed: Any, threads: Any) -> Any:
    """Wait until all tasks are done; return the address of the next phase's words."""
    call(barrier)
    return claimed + threads * WORD
