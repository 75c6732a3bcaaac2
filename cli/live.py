"""A line on a terminal that changes while something is under way."""

from __future__ import annotations

import shutil
import sys
from typing import Self


class LiveLine:
    """One line on stderr that is drawn over and over, and leaves nothing behind."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled

    def draw(self, text: str) -> None:
        if self.enabled:
            # A line that wraps could not be drawn over.
            text = text[: shutil.get_terminal_size().columns - 1]
            sys.stderr.write(f"\r{text}\x1b[K")
            sys.stderr.flush()

    def clear(self) -> None:
        self.draw("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
