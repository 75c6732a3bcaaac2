"""Output on a terminal without the control characters in untrusted texts, which could steer it.

Data sets, model answers, logs, names of nodes and error messages can hold escape sequences that
move the cursor, hide lines or answer for the user.
"""

from __future__ import annotations

import re
import sys
from typing import Any, TextIO, cast

from .render import printable

# The codes of colors and bold text that commands use; printable text; everything else is dropped.
_COLOR = re.compile("(\x1b\\[(?:0|1|2|3[0-7]|9[0-7])m)")


class SafeTerminal:
    """A text stream on a terminal: `write` drops control characters; all else is the stream's."""

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        parts = _COLOR.split(text)  # every second part is a color
        parts[::2] = map(printable, parts[::2])
        return self.unfiltered.write("".join(parts))

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


def steer(stream: TextIO, codes: str) -> None:
    """Write control characters to a terminal, such as those that clear its line."""
    getattr(stream, "unfiltered", stream).write(codes)


def make_safe() -> None:
    """Drop control characters from what this process writes to a terminal."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream.isatty():
            setattr(sys, name, cast(TextIO, SafeTerminal(stream)))
