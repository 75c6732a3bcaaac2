"""Regular expressions of the user's, searched for within a time limit.

A pattern such as `(a+)+$` takes time that doubles with each character of a text that it does not
match. Python's matcher handles signals while it searches, so that a timer can end it.
"""

from __future__ import annotations

import re
import signal
import time
from types import FrameType

LIMIT_S = 1.0  # of the thread's processor time; a search takes microseconds
_LEAST_S = 0.01  # between two looks at the processor time


class TooSlow(Exception):
    """The search took longer than LIMIT_S."""


def search(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the first match in a text, None for none. Only for the main thread.

    Raises TooSlow after LIMIT_S. A process that waits for a processor or is stopped spends none.
    """
    begun = time.thread_time()
    is_over = False

    def look(signum: int, frame: FrameType | None) -> None:
        if is_over:
            return
        left_s = LIMIT_S - (time.thread_time() - begun)
        if left_s <= 0:
            raise TooSlow
        signal.setitimer(signal.ITIMER_REAL, max(left_s, _LEAST_S))

    before = signal.signal(signal.SIGALRM, look)
    rest_s, interval_s = signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    armed = time.monotonic()
    try:
        return pattern.search(text)
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if rest_s:  # somebody else's timer
            rest_s = max(rest_s - (time.monotonic() - armed), _LEAST_S)
            signal.setitimer(signal.ITIMER_REAL, rest_s, interval_s)
