"""Line charts in text: two by four dots of braille a character, with numbers on both axes.

No library is used: plotext 6 ships a compiled kernel for each platform, takes 0.11 s to import, and
broke the interface of plotext 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import click

COLORS = ("cyan", "yellow", "magenta", "green", "blue", "red")
MARKERS = "ox+*#@"  # of the lines, to distinguish them without color
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of braille: by x, then y
_ROW_STEP = 4  # rows between two numbers of the y axis

Line = tuple[Sequence[float], Sequence[float]]  # x, which rises, and y


def chart(
    lines: Sequence[Line],
    *,
    width: int,
    height: int,
    in_color: bool,
    faint: Sequence[Line] = (),
) -> list[str]:
    """Draw lines in `width` columns and `height` rows, and a row of numbers below.

    `faint`: drawn behind them, each in the pale color of the line of its place; only in color.

    A single line, or lines in different colors, are drawn in dots; several lines without color in
    `MARKERS`. No text is wider than `width`, which is at least 20. Every fourth row has a number on
    the y axis: with 4 n + 1 rows, the last one, too.
    """
    faint = faint if in_color else ()
    every = [*faint, *lines]
    left, right = min(min(xs) for xs, _ in every), max(max(xs) for xs, _ in every)
    low, high = min(min(ys) for _, ys in every), max(max(ys) for _, ys in every)
    labels = {
        row: _number(high - (high - low) * row / (height - 1), high - low)
        for row in range(0, height, _ROW_STEP)
        if low < high or row == 0
    }
    margin = max(map(len, labels.values()))
    columns = width - margin - 2
    is_dotted = in_color or len(lines) == 1
    canvas = _Canvas(columns, height, dots=(2, 4) if is_dotted else (1, 1))
    for number, (xs, ys) in [*((~i, line) for i, line in enumerate(faint)), *enumerate(lines)]:
        points = [
            ((x - left) / (right - left or 1), (high - y) / (high - low or 1))
            for x, y in zip(xs, ys, strict=True)
        ]
        canvas.draw(number, points)
    rows = [
        f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}"
        + "".join(_cell(cell, is_dotted, in_color) for cell in cells)
        for row, cells in enumerate(canvas.cells)
    ]
    return [*rows, _x_axis(left, right, margin, columns)]


def key(name: str, number: int, *, in_color: bool) -> str:
    """Return the legend of the line of this number."""
    if in_color:
        return click.style(f"━ {name}", fg=COLORS[number % len(COLORS)])
    return f"{MARKERS[number % len(MARKERS)]} {name}"


class _Canvas:
    """Rows of characters made of dots, and the line that drew each character last."""

    def __init__(self, columns: int, rows: int, *, dots: tuple[int, int]) -> None:
        self.dots = dots
        self.size = (columns * dots[0] - 1, rows * dots[1] - 1)
        # Per character: its dots as braille bits, and the number i of its line; ~i for a faint
        # line.
        self.cells = [[(0, 0)] * columns for _ in range(rows)]

    def draw(self, line: int, points: Sequence[tuple[float, float]]) -> None:
        """Connect points, both coordinates from 0 to 1, from the upper left."""
        last: tuple[int, int] | None = None
        for x, y in points:
            here = (round(x * self.size[0]), round(y * self.size[1]))
            if here != last:
                for dot in _between(last or here, here):
                    self._set(line, *dot)
                last = here

    def _set(self, line: int, x: int, y: int) -> None:
        column, dx = divmod(x, self.dots[0])
        row, dy = divmod(y, self.dots[1])
        dots, before = self.cells[row][column]
        kept = dots if (before < 0) == (line < 0) else 0  # a faint line gives way
        self.cells[row][column] = (kept | _DOTS[dx][dy], line)


def _between(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The dots of a straight line."""
    (x0, y0), (x1, y1) = start, end
    count = max(abs(x1 - x0), abs(y1 - y0), 1)
    for i in range(count + 1):
        yield round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)


def _cell(cell: tuple[int, int], is_dotted: bool, in_color: bool) -> str:
    dots, line = cell
    if not dots:
        return " "
    text = chr(0x2800 + dots) if is_dotted else MARKERS[line % len(MARKERS)]
    if not in_color:
        return text
    number = ~line if line < 0 else line
    return click.style(text, fg=COLORS[number % len(COLORS)], dim=True if line < 0 else None)


def _x_axis(left: float, right: float, margin: int, columns: int) -> str:
    """Numbers at the left, in the middle and at the right, as far as there is room."""
    first, last = f"{left:.10g}", f"{right:.10g}"
    middle = f"{round((left + right) / 2)}"
    room = columns - len(first) - len(last)
    if left == right or room < 1:
        return " " * (margin + 2) + first
    gap = " " * room
    if room > len(middle) + 2 and right - left > 1:
        at = (columns - len(middle)) // 2 - len(first)
        gap = gap[:at] + middle + gap[at + len(middle) :]
    return " " * (margin + 2) + first + gap + last


def _number(value: float, span: float) -> str:
    """A number of an axis, to a hundredth of the range of the axis."""
    if span == 0 or not 1e-3 <= max(abs(value), span) < 1e6:
        return f"{value:.4g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(span)))}f}"
