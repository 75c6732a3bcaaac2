"""Messages in what a model writes: content, reasoning and tool calls, apart as they arrive.

The parser is transformers' own (`ResponseParser`), driven by a response template of the model's
family (models/response_templates.py). A call that cannot be read stays text. Imports transformers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..files.chats import REASONING, TOOL_CALLS
from .response_parser import TooSlow, buffered, parser
from .response_templates import CONTENT

# A regular expression without operators: it stands for one text.
_LITERAL = re.compile(r"(?:\\\W|[^\\.^$*+?{}\[\]|()])+")
_PROMPT_TOKENS = 256  # at its end: what a chat template may have written of the answer


@dataclass
class Delta:
    """What a part of a completion adds to its message.

    `calls`: whole ones, each with an `id`, a `name`, and `arguments` as the JSON text of an object.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def add(self, other: Delta) -> None:
        """Append what follows."""
        self.content += other.content
        self.reasoning += other.reasoning
        self.calls += other.calls

    def after(self, known: Delta) -> Delta:
        """Return what this has beyond `known`, which begins it."""
        return Delta(
            self.content[len(known.content) :],
            self.reasoning[len(known.reasoning) :],
            self.calls[len(known.calls) :],
        )


def thinking_tags(template: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the texts that begin and end reasoning; None: there are none, or they vary."""
    fields = template["fields"]
    found: dict[str, Any] = next((fields[name] for name in REASONING if name in fields), {})
    end = found.get("close")
    if not isinstance(end, str):
        pattern = re.sub(r"\\s\*$", "", found.get("close_pattern", ""))
        if _LITERAL.fullmatch(pattern) is None:
            return None
        end = re.sub(r"\\(\W)", r"\1", pattern)
    # Templates that begin the reasoning in the prompt describe only its end, such as </think>.
    begin = found.get("open") or (f"<{end[2:]}" if end.startswith("</") else None)
    return (begin, end) if isinstance(begin, str) else None


class Malformed(Exception):
    """A text that the parser of the model's messages cannot read."""


class Reply:
    """One completion as a message that grows. `add` and `finish` return what is new."""

    def __init__(
        self,
        template: Mapping[str, Any],
        tokenizer: Any,
        prompt: Sequence[int],
        tools: list[dict[str, Any]] | None,
        *,
        seed: str,
        is_single: bool = False,
        is_limited: bool = True,
    ) -> None:
        """`tools`: those that may be called; None: calls stay text.

        `seed`: what the ids of calls are made of. `is_single`: what follows the first call is left
        out. `is_limited`: whether the expressions of the template have limits of time; if so, all
        methods raise TooSlow. Raises ValueError for a template that is none.
        """
        self.message = Delta()  # as it was written
        self._shown, self._held = Delta(), Delta()  # told so far; white space that may end a text
        self._template = template
        self._is_limited = is_limited
        self._tokenizer = tokenizer
        self._prompt = self._text_of(prompt[-_PROMPT_TOKENS:])
        self._tools = tools
        self._seed = seed
        self._is_single = is_single
        self._raw = ""
        self._is_text = False  # from a malformed call on
        self._parser = self._new_parser()

    @property
    def told(self) -> Delta:
        """All that `add` and `finish` have returned."""
        return self._shown

    def add(self, text: str) -> Delta:
        """Append a part of the completion, special tokens included."""
        if self._is_over:
            return Delta()
        self._raw += text
        if self._is_text:
            return self._told(Delta(content=text))
        try:
            return self._told(self._read(_events(self._parser, text)))
        except Malformed:
            return self._told(self._reread(is_end=False).after(self.message))

    def finish(self, end_token: int | None, *, is_whole: bool) -> Delta:
        """Return the rest at the end of the completion; `is_whole`: it was not cut."""
        if self._is_text or self._is_over:
            return Delta()
        if end_token is None:  # a grammar, a stop text or the length ended it
            end = self._tokenizer.eos_token or "" if is_whole else ""
        else:
            end = self._text_of([end_token])
        try:
            delta = self._read(_events(self._parser, end)) if end else Delta()
            delta.add(self._read(_events(self._parser, None)))
            if end:  # the parser takes an end token that the family does not know for text
                delta.content = delta.content.removesuffix(end)
                delta.reasoning = delta.reasoning.removesuffix(end)
            return self._told(delta)
        except Malformed:
            return self._told(self._reread(is_end=True).after(self.message))

    @property
    def _is_over(self) -> bool:
        """Whether what follows is left out."""
        return self._is_single and bool(self.message.calls)

    def _text_of(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _told(self, delta: Delta) -> Delta:
        """Return what is told of a delta: texts without the white space around them."""
        told = Delta(calls=delta.calls)
        told.content, self._held.content = _stripped(
            self._held.content + delta.content, is_first=not self._shown.content
        )
        told.reasoning, self._held.reasoning = _stripped(
            self._held.reasoning + delta.reasoning, is_first=not self._shown.reasoning
        )
        self.message.add(delta)
        self._shown.add(told)
        return told

    def _new_parser(self) -> Any:
        # What the prompt has of the message is not part of the completion: no `initial_events`.
        return parser(self._template, self._prompt, self._tools, is_limited=self._is_limited)

    def _read(self, events: Iterable[Mapping[str, Any]], count: int | None = None) -> Delta:
        """Return what the parser's events add; `count`: of the calls before (None: of all)."""
        delta = Delta()
        count = len(self.message.calls) if count is None else count
        for event in events:
            if self._is_single and count + len(delta.calls):
                break
            name = event["field"]
            if name == TOOL_CALLS:
                if event["type"] == "region_open" and self._tools is None:
                    raise Malformed
                if event["type"] == "region_close":
                    for value in _listed(event["value"]):
                        delta.calls.append(self._call(value, count + len(delta.calls)))
            elif event["type"] == "region_chunk":
                if name in REASONING:
                    delta.reasoning += event["text"]
                elif name == CONTENT:
                    delta.content += event["text"]
                else:
                    raise Malformed  # a part of messages that no client knows
        return delta

    def _call(self, value: Any, number: int) -> dict[str, str]:
        function = value.get("function") if isinstance(value, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name.isprintable():
            raise Malformed
        if not isinstance(arguments or {}, dict):
            raise Malformed
        # The number first: some clients give the model the results of calls sorted by their ids.
        digest = hashlib.sha256(f"{self._seed}/{number}".encode()).hexdigest()
        identifier = f"call_{number:03x}{digest[:21]}"
        return {"id": identifier, "name": name, "arguments": _json_of(arguments or {})}

    def _reread(self, *, is_end: bool) -> Delta:
        """Read the whole completion again, up to the region that cannot be read, which is text.

        The parser loses the events of a text in which it fails: here it gets single characters.
        """
        reader, found = self._new_parser(), Delta()
        unread = ""  # characters that no event has accounted for
        for place, character in enumerate(self._raw):
            unread += character
            try:
                delta = self._read(_events(reader, character), len(found.calls))
            except Malformed:
                found.content += unread + self._raw[place + 1 :]
                self._is_text = True
                return found
            found.add(delta)
            for text in (delta.reasoning, delta.content):
                if text:
                    unread = unread[unread.index(text) + len(text) :]
            if delta.calls:
                unread = buffered(reader)
                if self._is_single:
                    return found
        if is_end:
            try:
                found.add(self._read(_events(reader, None), len(found.calls)))
            except Malformed:
                found.content += unread
        return found


def _events(reader: Any, text: str | None) -> list[dict[str, Any]]:
    """Return a parser's events for more text; None: for the end. Raises Malformed, TooSlow."""
    try:
        found: list[dict[str, Any]]
        found = reader.finalize()[1] if text is None else reader.feed(text)
    except TooSlow:
        raise
    except Exception as error:  # of any type: what a model writes goes into JSON and casts
        raise Malformed(str(error)) from error
    return found


def _json_of(arguments: dict[str, Any]) -> str:
    """Return the JSON text of arguments, integers of any size included. Raises Malformed."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except ValueError as error:  # NaN or infinity, or half of a surrogate pair
        raise Malformed(str(error)) from error
    return text


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _stripped(text: str, *, is_first: bool) -> tuple[str, str]:
    """Return a text, and apart the white space at its end; `is_first`: none at its begin."""
    if is_first:
        text = text.lstrip()
    begin = text.rstrip()
    return begin, text[len(begin) :]
