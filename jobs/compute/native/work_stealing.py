"""Pieces of work that threads share: each has a part of its own, and then takes from the others'.

Threads are not equally fast: some cores are slower than others, and any may be lent to another
program for a while. Whoever is done with the own part helps.
"""

from __future__ import annotations

from typing import Any

from .compiling import compiled
from .intrinsics import add_to, call, words
from .rowwise import WORD

_FROM_END = 1 << 32
_FROM_BEGIN = _FROM_END - 1


@compiled
def take(count: Any, thread: Any, threads: Any, taken: Any) -> Any:
    """Return one of `count` pieces that nobody has taken yet; -1 where there is none.

    `taken`: a word for each thread, zeros at first. It counts what is taken of its part: by itself,
    from the begin on, in the lower half; by others, from the end on, in the upper one.
    """
    for turn in range(threads):
        owner = (thread + turn) % threads
        begin, end = count * owner // threads, count * (owner + 1) // threads
        place = taken + owner * WORD
        before = words(place)[0]  # looked at first: who finds nothing is not to count
        if begin + (before & _FROM_BEGIN) < end - (before >> 32):
            before = add_to(place, 1 if owner == thread else _FROM_END)
            first, last = begin + (before & _FROM_BEGIN), end - (before >> 32) - 1
            if first <= last:
                return first if owner == thread else last
    return -1


@compiled
def meet(barrier: Any, taken: Any, threads: Any) -> Any:
    """Wait until all pieces are done; return where the words are for those that come next."""
    call(barrier)
    return taken + threads * WORD
