"""The contexts of an agent's episode: which of them a request continues, and which opens another.

A request has the whole conversation. If it is that of a known context, with the model's latest turn
as it was answered and messages of others behind it, it continues the tokens of that context.
Anything else, such as a rewritten history or a second request at the same time, opens a new
context. In doubt a context is opened: a token is never taken for another. Imports no torch.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from ..files.chats import Messages
from ..models import image_parts
from .endpoint import AgentRequest


@dataclass(eq=False)
class Context:
    """A sequence of tokens of an episode, and the conversation that it stands for.

    `segments`: after the prompt. `history`: its messages as `plain` has them, the model's included;
    `shown`: the same for people, as Episode.messages. `digest`: of prompt, tools and number; 0 for
    the first context. `is_open`: whether a request may continue it.
    """

    prompt: list[int]
    tools: str
    digest: int
    history: list[Any] = field(default_factory=list)
    shown: list[Any] = field(default_factory=list)
    segments: list[Any] = field(default_factory=list)  # engine.rollouts.Segment
    turns: int = 0
    screen: tuple[int, int] | None = None  # the size of the latest image, in pixels
    missing_end: list[int] = field(default_factory=list)  # to put behind its latest turn
    calls: list[str] = field(default_factory=list)  # the tools that its latest turn has called
    is_open: bool = False

    def show(self, messages: Messages, images: Sequence[Any]) -> None:
        """Add messages that the policy has seen to `shown`. `images`: theirs, in their order."""
        sizes = [image.size for image in images]
        self.shown.append(image_parts.shown(image_parts.split(messages)[0], sizes))
        if sizes:
            self.screen = sizes[-1]


@dataclass(eq=False)
class Asked:
    """A request, and what became of it.

    `mark`: how many segments and shown messages its context had before. `waiting`: for the reply,
    which is None until the turn is over.
    """

    context: Context
    fingerprint: str
    mark: tuple[int, int]
    waiting: list[AgentRequest]
    reply: dict[str, Any] | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits for the reply, or has got it."""
        return all(one.is_lost for one in self.waiting)

    @property
    def is_delivered(self) -> bool:
        """Whether the agent has got the reply; a turn that it has not got is not learned."""
        return self.reply is not None and not self.is_abandoned


class Session:
    """The requests of one attempt at an episode."""

    def __init__(self) -> None:
        self.contexts: list[Context] = []
        self.asked: list[Asked] = []
        self.limit: str | None = None  # the latest limit that a request was refused for
        self._opened = Counter[int]()

    @property
    def turns(self) -> int:
        """The turns that were requested."""
        return len(self.asked)

    def repeated(self, fingerprint: str, *, is_retry: bool) -> Asked | None:
        """Return the request that an equal one repeats, because it has not got the reply.

        `is_retry`: whether the client says that it has sent the request before.
        """
        same = [one for one in self.asked if one.fingerprint == fingerprint]
        found = next((one for one in same if one.is_abandoned), None)
        if found is None and is_retry:  # its connection may have ended without a word
            found = next((one for one in same if one.reply is None), None)
            if found is None and same and same[-1] is self.asked[-1]:
                found = same[-1]
        return found

    def continued(
        self, messages: Messages, tools: str
    ) -> tuple[Context, list[dict[str, Any]]] | None:
        """Return the context that a conversation continues, and its new messages."""
        found: Context | None = None
        whole = plain(messages)
        for one in self.contexts:
            size = len(one.history)
            is_longer = found is None or size > len(found.history)
            if one.is_open and is_longer and one.tools == tools and whole[:size] == one.history:
                rest = messages[size:]
                if rest and all(message["role"] != "assistant" for message in rest):
                    found = one
        return None if found is None else (found, list(messages[len(found.history) :]))

    def open(
        self, prompt: list[int], messages: Messages, tools: str, images: Sequence[Any] = ()
    ) -> Context:
        """Begin a context. `images`: engine.request.Image, in the order of the messages."""
        digest = 0
        if self.contexts:
            seen = [*prompt, *(image.digest for image in images)]
            content = zlib.crc32(array("q", seen).tobytes())
            self._opened[content] += 1
            digest = (content << 16 | self._opened[content]) or 1
        context = Context(prompt, tools, digest, plain(messages))
        context.show(messages, images)
        self.contexts.append(context)
        return context

    def forget_latest(self) -> None:
        """Forget the context that was opened last, whose first request was refused."""
        latest = self.contexts.pop()
        if latest.digest:
            self._opened[latest.digest >> 16] -= 1

    def take_back(self, asked: Asked) -> None:
        """Forget a request whose turn was begun and could not be completed."""
        self.asked.remove(asked)
        self._undo(asked)

    def _undo(self, asked: Asked) -> None:
        segments, shown = asked.mark
        del asked.context.segments[segments:], asked.context.shown[shown:]

    def learned(self) -> list[Context]:
        """Return the contexts that have delivered turns, without turns that were not.

        The first one first; the others in an order that does not depend on time.
        """
        for one in reversed(self.asked):
            if not one.is_delivered:
                self._undo(one)
        found = [one for one in self.contexts if one.segments]
        return sorted(found, key=lambda one: one.digest)


def plain(messages: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return messages in the form in which they are compared.

    Clients drop empty fields, merge parts of text, strip what the model wrote, and write arguments
    of calls anew. The ids of calls and reasoning are left out: templates do not need the first, and
    drop the second.
    """
    return [
        (
            one["role"],
            _text(one),
            [
                (
                    call["function"]["name"],
                    json.dumps(call["function"]["arguments"], sort_keys=True),
                )
                for call in one.get("tool_calls") or ()
            ],
            one.get("name") if one["role"] != "tool" else None,
        )
        for one in messages
    ]


def _text(message: Mapping[str, Any]) -> Any:
    content = message.get("content") or ""
    if isinstance(content, list):  # with images, of a megabyte each
        return [
            one["text"]
            if one["type"] == "text"
            else {"image": sha256(one["image_url"]["url"].encode()).hexdigest()}
            for one in content
        ]
    return content.strip() if message["role"] == "assistant" else content


def written_of(contexts: Sequence[Context]) -> list[Any]:
    """Return the segments of contexts, each after the first with its prompt."""
    found: list[Any] = []
    for number, one in enumerate(contexts):
        first, *rest = one.segments
        if number:
            first.prompt = one.prompt
        found += [first, *rest]
    return found


def shown_of(contexts: Sequence[Context]) -> list[Any]:
    """Return the messages of contexts, as Episode.messages has them."""
    found: list[Any] = []
    for number, one in enumerate(contexts):
        opening, *rest = one.shown
        if number:
            opening = [{"role": "context", "content": f"{number + 1}"}, *opening]
        found += [opening, *rest]
    return found
