"""transformers' parser of messages, with a limit on the time of its regular expressions.

A response template is a file of a user or of a model: an expression such as `(a|aa)+$` would take
hours for a short text, and no other request of the process would run meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from ..errors import JobFailed
from .response_templates import compiled, loaded, tag_patterns

LIMIT_S = 10.0  # processor time for a completion, as a chat template has
SEARCH_S = 1.0  # for one search


class TooSlow(JobFailed):
    """A response template whose expressions take longer than a limit."""


class _Clock:
    """The time that the searches of one completion may still take."""

    def __init__(self) -> None:
        self._left_s = LIMIT_S

    def run(self, search: Callable[..., Any], *args: Any, **how: Any) -> Any:
        """Call a method of a compiled expression. Raises TooSlow."""
        begun = time.thread_time()
        try:
            if self._left_s <= 0:
                raise TimeoutError
            # The library counts the time of all threads: it may end a search early, never late.
            return search(*args, timeout=min(SEARCH_S, self._left_s), **how)
        except TimeoutError:
            raise TooSlow(
                "messages: the regular expressions of the response template take more than "
                f"{SEARCH_S:g} s for one search, or {LIMIT_S:g} s for a completion"
            ) from None
        finally:
            self._left_s -= time.thread_time() - begun


class _Timed:
    """A compiled expression whose searches have a limit."""

    def __init__(self, pattern: Any, clock: _Clock) -> None:
        self._pattern = pattern
        self._clock = clock

    def search(self, text: str, start: int, **how: Any) -> Any:
        return self._clock.run(self._pattern.search, text, start, **how)

    def match(self, text: str, start: int) -> Any:
        return self._clock.run(self._pattern.match, text, start)

    def finditer(self, text: str) -> list[Any]:
        def found(text: str, timeout: float) -> list[Any]:
            return list(self._pattern.finditer(text, timeout=timeout))

        matches: list[Any] = self._clock.run(found, text)
        return matches


class _Limited(ResponseParser):
    """A parser whose searches have limits."""

    def __init__(self, template: Any, prompt: str, tools: Any) -> None:
        self._clock = clock = _Clock()

        def timed(pattern: Any) -> Any:
            return None if pattern is None else _Timed(pattern, clock)

        fields = {
            name: replace(field, open_re=timed(field.open_re), close_re=timed(field.close_re))
            for name, field in template.fields.items()
        }
        start = timed(template.start_anchor_re)
        super().__init__(
            replace(template, fields=fields, start_anchor_re=start), prompt, tools=tools
        )

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        """Try the expressions for the text of a region first: its parser has no limit."""
        if self._current is not None:
            for pattern in tag_patterns(self._spec.fields[self._current].content_args):
                _Timed(compiled(pattern), self._clock).finditer(self._body)
        super()._close_current(events)


def parser(template: Mapping[str, Any], prompt: str, tools: Any, *, is_limited: bool) -> Any:
    """Return a parser of one completion; `prompt`: the end of its prompt.

    Its methods raise TooSlow with `is_limited`. Raises ValueError for a template that is none.
    """
    known = loaded(template)
    if is_limited:
        return _Limited(known, prompt, tools)
    return ResponseParser(known, prompt, tools=tools)


def buffered(reader: Any) -> str:
    """Return the text that a parser has read and that none of its events accounts for yet."""
    text: str = reader._buffer[reader._pos :]
    return text
