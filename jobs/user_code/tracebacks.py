"""Error messages and tracebacks of user code, truncated: a message can have megabytes."""

from __future__ import annotations

import traceback
from collections.abc import Callable

MOST_REASON = 1000  # characters of the one line that names an error
MOST_TRACE = 20_000  # characters of a traceback


def reason(error: BaseException) -> str:
    """Return the type and the message of an error in one line."""
    try:
        message = str(error)
    except Exception:  # the __str__ of an exception may raise
        message = "its message cannot be shown"
    text = " ".join(f"{type(error).__name__}: {message}".split())
    return cut(text, MOST_REASON).removesuffix(":")


def trace(error: BaseException) -> str:
    """Return the traceback of an error, including the chained exceptions."""
    return cut("".join(traceback.format_exception(error)), MOST_TRACE)


def cut(text: str, most: int) -> str:
    """Return a text; if it is longer than `most` characters, its start and end with a note."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [… {len(text) - 2 * half:,} characters left out …] {text[-half:]}"


def place(error: BaseException, is_own: Callable[[str], bool]) -> str | None:
    """Return FILE:LINE of the innermost frame in a file that `is_own`, else in any file."""
    places = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [found for found in places if is_own(found[0])] or places
    return f"{own[-1][0]}:{own[-1][1]}" if own else None
