"""Pairs of a data set for DPO, and the tokens of their prompt and two completions.

A row is one of three forms:

    {"prompt": …, "chosen": …, "rejected": …}    texts, of which the prompt may be empty, or chats
    {"chosen": […], "rejected": […]}             chats; their common first messages are the prompt
    {"input": {"messages": […]}, "preferred_output": […], "non_preferred_output": […]}    OpenAI's

A chat may have `tools` and `chat_template_kwargs`, which its template gets; OpenAI's has `tools` in
its `input`.
Tokens are those of TRL's DPOTrainer. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from ..data import keys
from ..data.lengths import Lengths, num_shared
from ..errors import JobFailed
from ..files import jsonl
from ..files.chats import (
    NO_INPUTS,
    TOOLS,
    Chat,
    Messages,
    TemplateInputs,
    inputs_of,
    read_messages,
    refuse_inputs,
)
from ..models import chat_templates
from ..models.chat_templates import NO_TEMPLATE, ChatTemplate
from ..training.rows import RowSource, ended_by_assistant, prompt_text


@dataclass(frozen=True)
class Pair:
    """A prompt with the completion to prefer and the one to avoid."""

    place: jsonl.Place
    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages
    inputs: TemplateInputs = NO_INPUTS  # of a chat

    @property
    def is_chat(self) -> bool:
        """Whether it goes through the chat template."""
        return not isinstance(self.prompt, str)

    @property
    def opening(self) -> str | Chat:
        """Its prompt."""
        return self.prompt if isinstance(self.prompt, str) else Chat(self.prompt, self.inputs)

    @property
    def sides(self) -> tuple[str | Chat, str | Chat]:
        """Its prompt with each completion: the one to prefer, and the one to avoid."""
        return self._joined(self.chosen), self._joined(self.rejected)

    def _joined(self, side: str | Messages) -> str | Chat:
        if isinstance(self.prompt, str) or isinstance(side, str):
            return f"{self.prompt}{side}"
        return Chat(self.prompt + side, self.inputs)

    @property
    def messages(self) -> Messages:
        """The messages of its prompt and both completions; none where they are texts."""
        parts = (self.prompt, self.chosen, self.rejected)
        return [message for part in parts if not isinstance(part, str) for message in part]

    @property
    def parts(self) -> frozenset[str]:
        """What its chat template must know: see Chat.parts."""
        return frozenset().union(*(s.parts for s in self.sides if isinstance(s, Chat)))

    @property
    def content(self) -> list[Any]:
        """The content to learn, as plain JSON values."""
        found = [self.prompt, self.chosen, self.rejected]
        return [*found, self.inputs.content] if self.inputs else found


@dataclass(frozen=True)
class _Names:
    """The fields of a row that have the completions."""

    chosen: str
    rejected: str


_OURS = _Names("chosen", "rejected")
_OPENAI = _Names("preferred_output", "non_preferred_output")
_INPUT = {"messages", TOOLS, keys.PARALLEL}


@dataclass(frozen=True, kw_only=True)
class Source(RowSource[Pair]):
    """Where pairs come from, and how they are read."""

    known: ClassVar[frozenset[str]] = keys.READ["dpo"]

    def row(self, values: Mapping[str, Any], place: jsonl.Place) -> Pair:
        keys.refuse_ignored(values, place, reads=keys.CHECKED)
        pair, inputs = self._pair(values, place), inputs_of(values, place)
        if "input" in values:
            inputs = inputs_of(values["input"], place.field("input")).over(inputs)
            keys.check_parallel(values["input"], pair.messages, place.field("input"))
        keys.check_parallel(values, pair.messages if pair.is_chat else "", place)
        if not pair.is_chat:
            refuse_inputs(inputs, place)
        return replace(pair, inputs=inputs) if inputs else pair

    def _pair(self, values: Mapping[str, Any], place: jsonl.Place) -> Pair:
        if "input" in values:
            messages = _input_messages(values["input"], place.field("input"))
            return self._chat_pair(messages, values, _OPENAI, place)
        _require(values, _OURS, place)
        prompt = values.get("prompt")
        if isinstance(prompt, list):
            messages = read_messages(prompt, place.field("prompt"))
            return self._chat_pair(messages, values, _OURS, place)
        if "prompt" in values:
            text = prompt_text(prompt, place.field("prompt"), is_chat=self.chat_template)
            return self._text_pair(text, values, place)
        if isinstance(values["chosen"], list):
            return self._whole_chats(values, place)
        raise place.fault("an object with a prompt", jsonl.keys_of(dict(values)))

    def _text_pair(self, prompt: str, values: Mapping[str, Any], place: jsonl.Place) -> Pair:
        chosen, rejected = (
            jsonl.text(values[name], place.field(name)) for name in ("chosen", "rejected")
        )
        _check_unequal(chosen, rejected, place.field("rejected"), "chosen")
        if not self.chat_template:
            return Pair(place, prompt, chosen, rejected)
        opening = self.opened([{"role": "user", "content": prompt}])
        return Pair(place, opening, _said(chosen), _said(rejected))

    def _chat_pair(
        self, prompt: Messages, values: Mapping[str, Any], names: _Names, place: jsonl.Place
    ) -> Pair:
        _require(values, names, place)
        chosen, rejected = (
            ended_by_assistant(values[name], place.field(name))
            for name in (names.chosen, names.rejected)
        )
        _check_unequal(chosen, rejected, place.field(names.rejected), names.chosen)
        return Pair(place, self.opened(prompt), chosen, rejected)

    def _whole_chats(self, values: Mapping[str, Any], place: jsonl.Place) -> Pair:
        chosen, rejected = (
            ended_by_assistant(values[name], place.field(name)) for name in ("chosen", "rejected")
        )
        of_rejected = place.field("rejected")
        _check_unequal(chosen, rejected, of_rejected, "chosen")
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        if shared == 0:
            raise of_rejected.fault("a chat that begins as chosen does", "another first message")
        if shared == min(len(chosen), len(rejected)):
            raise of_rejected.fault("a chat that ends otherwise than chosen", "a part of it")
        return Pair(place, self.opened(chosen[:shared]), chosen[shared:], rejected[shared:])


def _require(values: Mapping[str, Any], names: _Names, place: jsonl.Place) -> None:
    for name in (names.chosen, names.rejected):
        if name not in values:
            raise place.fault(
                "an object with prompt, chosen and rejected"
                if names is _OURS
                else "an object with input, preferred_output and non_preferred_output",
                jsonl.keys_of(dict(values)),
            )


def _input_messages(value: Any, place: jsonl.Place) -> Messages:
    # Other keys are refused: dropping them would change the prompt.
    if not isinstance(value, dict) or not {"messages"} <= value.keys() <= _INPUT:
        got = jsonl.keys_of(value) if isinstance(value, dict) else jsonl.kind_of(value)
        raise place.fault("an object of messages, tools and parallel_tool_calls", got)
    return read_messages(value["messages"], place.field("messages"))


def _check_unequal(chosen: Any, rejected: Any, place: jsonl.Place, name: str) -> None:
    if chosen == rejected:
        raise place.fault(f"another completion than {name}", "the same")


def _said(completion: str) -> Messages:
    return [{"role": "assistant", "content": completion}]


# Tokens.

SIDES = ("prompt", "chosen", "rejected")  # of an example, in the order of its tokens on disk


@dataclass(frozen=True)
class Example:
    """The tokens of a pair: its prompt, and each completion after it."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def num_learned(self) -> int:
        """The tokens with a loss."""
        return len(self.chosen) + len(self.rejected)

    @property
    def longest(self) -> int:
        """The tokens of the longer side, with the prompt."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))

    def columns(self) -> dict[str, list[int]]:
        sides = (self.prompt, self.chosen, self.rejected)
        return {
            "ids": [token for side in sides for token in side],
            "side": [number for number, side in enumerate(sides) for _ in side],
        }

    def stock(self) -> dict[str, list[int]]:
        """Return the pair as TRL's trainer takes it."""
        return {
            "prompt_ids": self.prompt,
            "chosen_ids": self.chosen,
            "rejected_ids": self.rejected,
        }

    @classmethod
    def of_columns(cls, columns: Mapping[str, Any]) -> Self:
        ends = columns["side"].searchsorted(range(1, len(SIDES)))
        first, second = (int(end) for end in ends)
        ids = columns["ids"].tolist()
        return cls(ids[:first], ids[first:second], ids[second:])

    def cut(self, max_length: int) -> Example:
        """Return the pair with each side cut at its end."""
        room = max(max_length - len(self.prompt), 0)
        return Example(self.prompt, self.chosen[:room], self.rejected[:room])


@dataclass(frozen=True)
class Tokenization:
    """How pairs become tokens."""

    tokenizer: Any
    max_length: int

    @property
    def dtypes(self) -> dict[str, str]:
        """The columns of an example with their numpy types."""
        return {"ids": "<i4", "side": "<u1"}

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that the tokens depend on, except rows, tokenizer and `max_length`."""
        return {"template": self.tokenizer.chat_template}

    def encode(self, rows: Iterable[Pair], lengths: Lengths) -> Iterator[Example]:
        """Yield the examples of pairs, each side cut at `max_length`, and count their lengths.

        Pairs whose prompt alone is that long are dropped. Raises JobFailed for a chat that the
        template refuses.
        """
        for row in rows:
            whole = self._example(row, lengths)
            example = whole.cut(self.max_length)
            lengths.add(whole.longest, example.num_learned)
            if example.num_learned:
                yield example

    def _example(self, row: Pair, lengths: Lengths) -> Example:
        prompt = self._tokens(row.opening, row, add_generation_prompt=True)
        chosen, rejected = (self._tokens(self._ended(side), row) for side in row.sides)
        # The completions begin where the tokens differ: some may span the end of the prompt.
        begin = min(num_shared(prompt, chosen), num_shared(prompt, rejected))
        if begin < len(prompt):
            lengths.add_divergence(row.place.text, self.tokenizer.decode(prompt[begin:]))
        return Example(prompt[:begin], chosen[begin:], rejected[begin:])

    def _ended(self, side: str | Chat) -> str | Chat:
        """Return a text with the end-of-sequence token; a chat's template ends it."""
        end = self.tokenizer.eos_token
        return side if isinstance(side, Chat) or side.endswith(end) else side + end

    def _tokens(
        self, content: str | Chat, row: Pair, *, add_generation_prompt: bool = False
    ) -> list[int]:
        if isinstance(content, str):
            return list(self.tokenizer(text=content)["input_ids"])
        if not self.tokenizer.chat_template:
            raise JobFailed(": ".join(NO_TEMPLATE))
        text = chat_templates.render(
            ChatTemplate.of(self.tokenizer),
            content,
            field=row.place.text,
            add_generation_prompt=add_generation_prompt,
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
