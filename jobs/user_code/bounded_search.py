"""Search with a user's regular expression, within a time limit.

A pattern such as `(a+)+$` needs twice the time for each further character of a text that does not
match. Python handles signals during a search, so a timer can end it.
"""

from __future__ import annotations

import re
import signal
import time
from types import FrameType

LIMIT_S = 1.0  # processor time of the thread; a usual search takes microseconds
_LEAST_S = 0.01  # minimum time between two checks


class TooSlow(Exception):
    """The search took longer than LIMIT_S."""


def search(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the first match in a text, or None. Only for the main thread.

    Raises TooSlow after LIMIT_S of processor time: waiting for a processor does not count.
    """
    begun = time.thread_time()
    is_over = False

    def check(signum: int, frame: FrameType | None) -> None:
        if is_over:
            return
        left_s = LIMIT_S - (time.thread_time() - begun)
        if left_s <= 0:
            raise TooSlow
        signal.setitimer(signal.ITIMER_REAL, max(left_s, _LEAST_S))

    before = signal.signal(signal.SIGALRM, check)
    rest_s, interval_s = signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    armed = time.monotonic()
    try:
        return pattern.search(text)
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if rest_s:  # a timer that ran before
            rest_s = max(rest_s - (time.monotonic() - armed), _LEAST_S)
            signal.setitimer(signal.ITIMER_REAL, rest_s, interval_s)
