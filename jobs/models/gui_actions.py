"""Parses the completion of a GUI agent into actions: clicks in pixels, keys, texts.

The words are those of UI-TARS (arXiv:2501.12326): `Thought: …` and then `Action:` with calls such
as `click(start_box='(x,y)')`, one per line, whose coordinates are thousandths of the screen. A
model may generate anything: text that cannot be parsed becomes an error next to the parsed actions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import SpecError

FORMATS = ("none", "ui-tars")
NUMBERED = 1000  # parts that a screen's width and height have each
DIRECTIONS = ("up", "down", "left", "right")

Screen = tuple[int, int]  # width and height in pixels

# Each action with its arguments; those in brackets may be left out.
ACTIONS = {
    "click": ("start_box",),
    "left_double": ("start_box",),
    "right_single": ("start_box",),
    "drag": ("start_box", "end_box"),
    "hotkey": ("key",),
    "type": ("content",),
    "scroll": ("[start_box]", "direction"),
    "wait": (),
    "finished": ("[content]",),
    "call_user": (),
}

_ACTION = re.compile(r"^[ \t]*Action:", re.MULTILINE)
_THOUGHT = re.compile(r"\s*Thought:\s*")
_BETWEEN = re.compile(r"(?:\s|;|Action:)*")
_NAME = re.compile(r"([A-Za-z_]+)\(\s*")
_KEY = re.compile(r"([A-Za-z_]+)\s*=\s*")
# Quotes within the text need not be escaped: the closing one precedes the next argument or the end.
_TEXT = re.compile(
    r"""(['"])((?:\\.|[^\\])*?)\1(?=\s*(?:,\s*[A-Za-z_]+\s*=|\)\s*(?:;|\n|$)))""", re.DOTALL
)
_COMMA = re.compile(r"\s*,\s*")
_END = re.compile(r"\s*\)")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "'": "'", '"': '"', "\\": "\\"}
_MARKS = re.compile(r"<\|box_(?:start|end)\|>")
_NUMBER = r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*"
_POINT = re.compile(rf"[(\[]?{_NUMBER},{_NUMBER}(?:,{_NUMBER},{_NUMBER})?[)\]]?", re.ASCII)


class _Unreadable(Exception):
    """An action that cannot be parsed."""


def parse_screen(text: str) -> Screen:
    """Read WIDTHxHEIGHT. Raises SpecError."""
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text, re.ASCII)
    if found is None:
        raise SpecError("screen", f"must be WIDTHxHEIGHT in pixels, got {text[:40]!r}")
    return int(found[1]), int(found[2])


def read(text: str, screen: Screen | None) -> dict[str, Any]:
    """Return the `thought`, the `actions` in their order, and the `errors`.

    Points are [x, y] in pixels of the `screen`; if that is unknown, fractions of it from 0 to 1.
    """
    thought, calls = _halves(text)
    actions: list[dict[str, Any]] = []
    errors: list[dict[str, str]] = []
    if calls is None:
        errors.append({"text": text, "error": "there is no line that begins with Action:"})
    else:
        for part, call in _calls(calls):
            try:
                if isinstance(call, str):
                    raise _Unreadable(call)
                actions.append(_action(*call, screen))
            except _Unreadable as error:
                errors.append({"text": part, "error": str(error)})
        if not actions and not errors:
            errors.append({"text": text, "error": "there is nothing behind Action:"})
    return {
        "thought": thought,
        "screen": None if screen is None else list(screen),
        "actions": actions,
        "errors": errors,
    }


def _halves(text: str) -> tuple[str | None, str | None]:
    """The thought, and the text after the first `Action:`."""
    found = _ACTION.search(text)
    before = text if found is None else text[: found.start()]
    opening = _THOUGHT.match(before)
    thought = before[opening.end() :] if opening else before
    return thought.strip() or None, None if found is None else text[found.end() :]


def _calls(text: str) -> Iterator[tuple[str, tuple[str, dict[str, str]] | str]]:
    """Yield each action: its text, and its name and arguments, or the error."""
    at = _after(_BETWEEN, text, 0)
    while at < len(text):
        try:
            call, end = _call(text, at)
            yield text[at:end], call
        except _Unreadable as error:
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            yield text[at:end].strip(), str(error)
        at = _after(_BETWEEN, text, end)


def _call(text: str, at: int) -> tuple[tuple[str, dict[str, str]], int]:
    found = _NAME.match(text, at)
    if found is None:
        raise _Unreadable("it is not written as name(…)")
    name, at = found[1], found.end()
    arguments: dict[str, str] = {}
    while not _END.match(text, at):
        if arguments:
            comma = _COMMA.match(text, at)
            if comma is None:
                raise _Unreadable("it does not end in )")
            at = comma.end()
        key = _KEY.match(text, at)
        value = None if key is None else _TEXT.match(text, key.end())
        if key is None or value is None:
            raise _Unreadable("its arguments are not written as key='text'")
        if key[1] in arguments:
            raise _Unreadable(f"it has {key[1]} twice")
        arguments[key[1]] = _ESCAPE.sub(lambda m: _ESCAPED.get(m[1], m[0]), value[2])
        at = value.end()
    return (name, arguments), _after(_END, text, at)


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None
    return found.end()


def _action(name: str, arguments: dict[str, str], screen: Screen | None) -> dict[str, Any]:
    if name not in ACTIONS:
        raise _Unreadable(f"{name} is none of {', '.join(ACTIONS)}")
    known = {argument.strip("[]"): argument[0] != "[" for argument in ACTIONS[name]}
    for key in arguments:
        if key not in known:
            raise _Unreadable(f"{name} takes no {key}")
    for key, is_needed in known.items():
        if is_needed and key not in arguments:
            raise _Unreadable(f"{name} must have {key}")
    action: dict[str, Any] = {"type": name}
    for key, value in arguments.items():
        field, make = _MAKERS.get(key, (key, None))
        if make is not None:
            action[field] = make(value)
        else:
            action[field] = _point(value, screen) if key.endswith("_box") else value
    return action


def _keys(text: str) -> list[str]:
    keys = text.split()
    if not keys:
        raise _Unreadable("key must name keys")
    return keys


def _direction(text: str) -> str:
    if text not in DIRECTIONS:
        raise _Unreadable(f"direction must be one of {', '.join(DIRECTIONS)}, got {text[:40]!r}")
    return text


# The name of an argument in an action, and its parser; None: a point or a text.
_MAKERS: dict[str, tuple[str, Callable[[str], Any] | None]] = {
    "start_box": ("start", None),
    "end_box": ("end", None),
    "key": ("keys", _keys),
    "direction": ("direction", _direction),
}


def _point(text: str, screen: Screen | None) -> list[float]:
    """The center of a box, or the point itself."""
    found = _POINT.fullmatch(_MARKS.sub("", text).strip())
    if found is None:
        raise _Unreadable(f"a box must be '(x,y)' or '(x1,y1,x2,y2)', got {text[:60]!r}")
    numbers = [float(number) for number in found.groups() if number is not None]
    if max(numbers) > NUMBERED:
        raise _Unreadable(f"a box must be within 0 and {NUMBERED}, got {text[:60]!r}")
    x, y = (sum(numbers[axis::2]) / len(numbers[axis::2]) / NUMBERED for axis in (0, 1))
    if screen is None:
        return [x, y]
    # The far edge belongs to the last pixel.
    return [min(round(x * screen[0]), screen[0] - 1), min(round(y * screen[1]), screen[1] - 1)]
