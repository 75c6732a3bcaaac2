"""The tokens of an episode: what the policy sampled stays as it is, and only the rest is rendered.

Text that is decoded and encoded again may be other tokens, whose log-probabilities are not those
that were sampled. So an observation is rendered behind a placeholder conversation, and the ids that
it adds are appended (TRL's method, GRPOTrainer 1.16). That is right only for a template that writes
the turns so far in the same way whatever follows, which `ChatTurns` checks. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

from ..errors import JobFailed
from ..files.chats import Chat, Messages, TemplateInputs
from ..models import chat_templates
from ..models.chat_templates import ChatTemplate

_KEPT = 1024  # observations whose tokens are kept
_USER = {"role": "user", "content": "dummy"}


class Turns(Protocol):
    """How the tokens between the turns of the policy are made; `is_chat`: by a chat template."""

    is_chat: bool

    def prompt(self, opening: str | Messages, name: str | None) -> list[int]:
        """Return the tokens before the policy's first turn; `name`: of the environment's class."""

    def observed(self, observation: Any, calls: Sequence[str]) -> list[int]:
        """Return the tokens between two turns of the policy, of which the first ended by itself.

        `calls`: the names of the tools that the policy has called in it.
        """


def messages_of(given: str | Messages) -> Messages:
    """Return text as a message of the user; messages as they are."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class RawTurns:
    """Of a model without a chat template: observations are appended as they are."""

    is_chat = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, opening: str | Messages, name: str | None = None) -> list[int]:
        ids: list[int] = self._tokenizer(_text(opening))["input_ids"]
        return ids

    def observed(self, observation: Any, calls: Sequence[str] = ()) -> list[int]:
        ids: list[int] = self._tokenizer(_text(observation), add_special_tokens=False)["input_ids"]
        return ids


class ChatTurns:
    """Of a model with a chat template: an observation is one or more messages.

    `ends`: the tokens by which a turn of the policy ends. `tools`: of each class of the
    environment, by its name. `option`: that an error names. Raises JobFailed for a template that
    writes earlier turns otherwise once others follow, and that TRL has no variant of.
    """

    is_chat = True

    def __init__(
        self,
        tokenizer: Any,
        *,
        ends: Collection[int],
        tools: Mapping[str | None, list[dict[str, Any]]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        option: str = "environment",
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._tools = tools or {}
        self._option = option
        self._without_tools = TemplateInputs(None, arguments or {})
        self._template = ChatTemplate.of(tokenizer)
        self._ended: dict[str | None, list[int]] = {}  # a dummy turn, by the tool that it calls
        self._rendered = lru_cache(_KEPT)(self._suffix)
        first = next(iter(self._tools.values()), None)
        name = first[0]["function"]["name"] if first else None
        try:
            self._check(name)
        except JobFailed:
            if (source := _training_template(tokenizer)) is None:
                raise
            self._template = self._template.replaced(source)
            self._check(name)

    def prompt(self, opening: str | Messages, name: str | None = None) -> list[int]:
        messages = messages_of(opening)
        inputs = TemplateInputs(self._tools.get(name), self._without_tools.arguments)
        return self._ids(messages, inputs)

    def observed(self, observation: Any, calls: Sequence[str] = ()) -> list[int]:
        observation = messages_of(observation)
        called = calls[0] if calls else None
        # Many observations are the same: a rendering takes milliseconds, in a process of its own.
        return list(self._rendered(json.dumps(observation), called))

    def _suffix(self, observation: str, called: str | None) -> list[int]:
        """Return the tokens that an observation (JSON of messages) adds after a turn."""
        if called not in self._ended:
            self._ended[called] = self._up_to_the_end([_USER, _dummy_turn(called)])
        ended = self._ended[called]
        messages = [_USER, _dummy_turn(called), *json.loads(observation)]
        whole = self._ids(messages, self._without_tools)
        if whole[: len(ended)] != ended:
            raise JobFailed(f"{self._option}: {_NOT_APPEND_ONLY}")
        return whole[len(ended) :]

    @cached_property
    def end(self) -> int | None:
        """The token by which the template ends a turn of the policy; None: it has none."""
        last = self._up_to_the_end([_USER, _dummy_turn(None)])[-1]
        return last if last in self._ends else None

    def _up_to_the_end(self, messages: Messages) -> list[int]:
        """Return the tokens up to the one that ends the last turn: what follows is not sampled."""
        ids = self._ids(messages, self._without_tools, add_generation_prompt=False)
        last = max((at for at, token in enumerate(ids) if token in self._ends), default=None)
        return ids if last is None else ids[: last + 1]

    def _check(self, tool: str | None) -> None:
        """Raise JobFailed unless a turn is written in the same way before each observation."""
        answer = {"role": "user", "content": "dummy"}
        cases: list[tuple[str | None, Messages]] = [(None, [answer])]
        if tool is not None:
            result = {"role": "tool", "name": tool, "content": "dummy"}
            cases = [(tool, [result]), (tool, [result, result])]
        for called, following in cases:
            before = [_USER, _dummy_turn(called)]
            ended = self._up_to_the_end(before)
            whole = self._ids([*before, *following], self._without_tools)
            if whole[: len(ended)] != ended:
                raise JobFailed(f"{self._option}: {_NOT_APPEND_ONLY}")

    def _ids(
        self, messages: Messages, inputs: TemplateInputs, *, add_generation_prompt: bool = True
    ) -> list[int]:
        text = chat_templates.render(
            self._template,
            Chat(messages, inputs),
            add_generation_prompt=add_generation_prompt,
        )
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


_NOT_APPEND_ONLY = (
    "the chat template of the model writes earlier turns otherwise once an "
    "observation follows, and TRL has no variant of it for training: what the policy sampled "
    "would not be what it is trained on"
)


def _training_template(tokenizer: Any) -> str | None:
    """Return TRL's variant of a known template; None if it has none."""
    from trl.chat_template_utils import get_training_chat_template

    try:
        found: str | None = get_training_chat_template(tokenizer)
    except Exception:  # it renders the template, which can raise anything
        return None
    return found


def _dummy_turn(tool: str | None) -> dict[str, Any]:
    """A turn of the policy: only how it ends matters, and for some templates the tool's name."""
    turn: dict[str, Any] = {"role": "assistant", "content": "" if tool else "dummy"}
    if tool is not None:
        function = {"name": tool, "arguments": {}}
        turn["tool_calls"] = [{"type": "function", "function": function}]
    return turn


def _text(observation: Any) -> str:
    """Return an observation as text, for a model without a chat template. Raises JobFailed."""
    if isinstance(observation, str):
        return observation
    if observation is None:
        return ""
    raise JobFailed(
        "environment: the model has no chat template, and takes text as an observation, got "
        "messages"
    )
