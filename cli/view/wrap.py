"""Word wrap for streamed text: lines end between words at the width of the terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

_TAB = 8  # columns between tab stops


class WordWrap:
    """Adds line breaks to a text that arrives in pieces.

    A word is held back until it is complete. One that is longer than a line is broken by the
    terminal.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        """`width`: returns the columns of the terminal, which may be resized."""
        self._width = width
        self._column = 0  # of the cursor
        self._gap = ""  # spaces before the word, dropped at a line break
        self._word = ""  # held back
        self._is_split = False  # whether the start of a long word has been written

    def feed(self, text: str) -> str:
        """Add a piece of text; return the text that can be written now."""
        return "".join(map(self._take, text))

    def flush(self) -> str:
        """Return the word that is held back, on a new line if it does not fit."""
        gap, word = self._gap, self._word
        self._gap = self._word = ""
        width = self._width()
        end = _end(self._column, gap + word)
        if word and self._column and end > width and (gap or not self._is_split):
            gap, end = "\n", _end(0, word)
        elif not word and end > width:
            gap, end = "", self._column
        if end > width:  # a tab does not leave the line, so that a tab's line is full
            end = width if "\t" in gap else end % width
        self._column = end
        self._is_split = False
        return gap + word

    def _take(self, character: str) -> str:
        if character == "\n":
            self._gap = self._gap if self._word else ""
            written = self.flush()
            self._column = 0
            return written + "\n"
        if character in " \t":
            written = self.flush() if self._word else ""
            self._gap += character
            return written
        if _cells(character) == 2:  # Chinese, Japanese and Korean have no spaces between words
            written = self.flush() if self._word else ""
            self._word = character
            return written + self.flush()
        self._word += character
        if _end(0, self._word) < self._width():
            return ""
        written = self.flush()
        self._is_split = True
        return written


def _end(column: int, text: str) -> int:
    """Return the column after a text that starts at `column`."""
    for character in text:
        column += _TAB - column % _TAB if character == "\t" else _cells(character)
    return column


def _cells(character: str) -> int:
    """Return the columns that a character takes on a terminal."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
