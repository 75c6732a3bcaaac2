"""Rows of a data set for supervised fine-tuning, and the tokens that a model learns from them.

A row is one of four forms:

    {"prompt": …, "completion": …}     texts, of which the prompt may be empty, or chat messages
    {"messages": […]}                  a chat that ends with an assistant
    {"question": …, "answer": …}       the question is put into a template
    {"text": …}                        learned as a whole

A chat may have `tools` and `chat_template_kwargs`, which its template gets. As in OpenAI's format,
a message of the assistant with `weight` 0 is read and not learned, and a row may have
`parallel_tool_calls`.
Rows are read at submission, to check the job before it is queued, and again in the work horse.
Tokens are those of TRL's SFTTrainer. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import orjson

from ..data import keys, templates
from ..data.lengths import Lengths, num_shared
from ..data.templates import AS_IT_IS
from ..errors import JobFailed
from ..files import jsonl
from ..files.chats import (
    NO_INPUTS,
    Chat,
    Messages,
    TemplateInputs,
    inputs_of,
    read_messages,
    refuse_inputs,
)
from ..files.numbers import Digits
from ..models import chat_templates
from ..models.chat_templates import NO_TEMPLATE, ChatTemplate
from ..training.rows import RowSource, ended_by_assistant, prompt_text

ASSISTANT = "assistant"
ZERO_WEIGHT = "weight 0"  # part of rows whose chat template must mark the assistant for it


@dataclass(frozen=True)
class Row:
    """One row to learn: a completion after its prompt, a whole chat, or a whole text."""

    place: jsonl.Place
    prompt: str | Messages | None  # None: `learned` is all there is
    learned: str | Messages
    inputs: TemplateInputs = NO_INPUTS  # of a chat
    zero_weight: tuple[int, ...] = ()  # which of the assistant's messages in `learned`, from 0

    @property
    def is_chat(self) -> bool:
        """Whether it goes through the chat template."""
        return not isinstance(self.learned, str)

    @property
    def opening(self) -> str | Chat:
        """Its prompt, or all of a row that is learned as a whole."""
        opening = self.learned if self.prompt is None else self.prompt
        return opening if isinstance(opening, str) else Chat(opening, self.inputs)

    @property
    def whole(self) -> str | Chat:
        """Its prompt with what is learned."""
        if isinstance(self.learned, str):
            assert not isinstance(self.prompt, list)
            return (self.prompt or "") + self.learned
        assert not isinstance(self.prompt, str)
        return Chat((self.prompt or []) + self.learned, self.inputs)

    @property
    def parts(self) -> frozenset[str]:
        """What its chat template must know: see Chat.parts; and ZERO_WEIGHT."""
        if isinstance(self.whole, str):
            return frozenset()
        return self.whole.parts | {ZERO_WEIGHT} if self.zero_weight else self.whole.parts

    @property
    def content(self) -> list[Any]:
        """The content to learn, as plain JSON values."""
        found: list[Any] = [self.prompt, self.learned]
        found += [self.inputs.content] if self.inputs else []
        return [*found, {"zero_weight": self.zero_weight}] if self.zero_weight else found


@dataclass(frozen=True, kw_only=True)
class Source(RowSource[Row]):
    """Where rows come from, and how they are read."""

    template: str = AS_IT_IS
    assistant_only_loss: bool = False

    known: ClassVar[frozenset[str]] = keys.READ["sft"]

    def row(self, values: Mapping[str, Any], place: jsonl.Place) -> Row:
        keys.refuse_ignored(values, place, reads=keys.CHECKED)
        row, inputs = self._row(values, place), inputs_of(values, place)
        if self.assistant_only_loss and not row.is_chat:
            raise place.fault("a chat (messages) for assistant_only_loss", "text")
        if not row.is_chat:
            refuse_inputs(inputs, place)
        keys.check_parallel(values, row.learned, place)
        return replace(row, inputs=inputs) if inputs else row

    def _row(self, values: Mapping[str, Any], place: jsonl.Place) -> Row:
        if "messages" in values:
            learned, zero_weight = self._learned(values["messages"], place.field("messages"))
            return Row(place, None, self.opened(learned), zero_weight=zero_weight)
        if "prompt" in values:
            return self._prompt_row(values, place)
        if "question" in values:
            question = jsonl.text(values["question"], place.field("question"))
            answer = _answer(values, place)
            return self._plain(templates.fill(self.template, question), answer, place)
        if "text" in values:
            return Row(place, None, jsonl.text(values["text"], place.field("text")))
        raise place.fault(
            "an object with prompt and completion, messages, question and answer, or text",
            jsonl.keys_of(dict(values)),
        )

    def _prompt_row(self, values: Mapping[str, Any], place: jsonl.Place) -> Row:
        prompt, completion = values["prompt"], values.get("completion")
        if completion is None:
            raise place.fault(
                "an object with a completion for its prompt", jsonl.keys_of(dict(values))
            )
        of_prompt, of_completion = place.field("prompt"), place.field("completion")
        if isinstance(prompt, list):
            opening = self.opened(read_messages(prompt, of_prompt))
            learned, zero_weight = self._learned(completion, of_completion)
            return Row(place, opening, learned, zero_weight=zero_weight)
        text = prompt_text(prompt, of_prompt, is_chat=self.chat_template)
        return self._plain(text, jsonl.text(completion, of_completion), place, is_joined=True)

    def _plain(
        self, prompt: str, completion: str, place: jsonl.Place, *, is_joined: bool = False
    ) -> Row:
        if self.chat_template:
            opening = self.opened([{"role": "user", "content": prompt}])
            return Row(place, opening, [{"role": "assistant", "content": completion}])
        space = "" if is_joined or prompt[-1:].isspace() else " "
        return Row(place, prompt, space + completion)

    def _learned(self, value: Any, place: jsonl.Place) -> tuple[Messages, tuple[int, ...]]:
        """Return messages that an assistant ends, and which of the assistant's have weight 0."""
        items = value if isinstance(value, list) else []
        found = [index for index, item in enumerate(items) if _has_zero_weight(item)]
        if not found:
            return ended_by_assistant(value, place), ()
        without = [
            {**item, "weight": 1} if index in found else item for index, item in enumerate(items)
        ]
        messages = ended_by_assistant(without, place)
        said = [index for index, one in enumerate(messages) if one["role"] == ASSISTANT]
        return messages, tuple(map(said.index, found))


def _has_zero_weight(message: Any) -> bool:
    if not isinstance(message, dict) or message.get("role") != ASSISTANT:
        return False
    weight = message.get("weight")
    return isinstance(weight, int | float) and not isinstance(weight, bool) and weight == 0


def _answer(values: Mapping[str, Any], place: jsonl.Place) -> str:
    if "answer" not in values:
        raise place.fault("an object with an answer for its question", jsonl.keys_of(dict(values)))
    answer = values["answer"]
    if jsonl.is_text(answer):
        return jsonl.text(answer, place.field("answer"))
    if isinstance(answer, Digits):
        return str(answer)
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return orjson.dumps(answer).decode()
    return jsonl.text(answer, place.field("answer"))


# Tokens.


@dataclass(frozen=True)
class Example:
    """The tokens of a row, and for each whether it is learned: 1 or 0."""

    ids: list[int]
    learned: list[int]

    @property
    def num_learned(self) -> int:
        """The tokens with a loss: the first one is never predicted."""
        return sum(self.learned[1:])

    def columns(self) -> dict[str, list[int]]:
        return {"ids": self.ids, "learned": self.learned}

    def stock(self) -> dict[str, list[int]]:
        """Return the row as TRL's trainer takes it: a label of -100 is not learned."""
        labels = [token if bit else -100 for token, bit in zip(self.ids, self.learned, strict=True)]
        return {"input_ids": self.ids, "labels": labels}

    @classmethod
    def of_columns(cls, columns: Mapping[str, Any]) -> Self:
        return cls(columns["ids"].tolist(), columns["learned"].tolist())


@dataclass(frozen=True)
class Tokenization:
    """How rows become tokens."""

    tokenizer: Any
    max_length: int
    completion_only_loss: bool = True
    assistant_only_loss: bool = False
    training_template: str | None = None  # in place of the tokenizer's own, to mark the assistant

    @property
    def dtypes(self) -> dict[str, str]:
        """The columns of an example with their numpy types."""
        return {"ids": "<i4", "learned": "<u1"}

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that the tokens depend on, except rows, tokenizer and `max_length`."""
        return {
            "template": self.training_template or self.tokenizer.chat_template,
            "completion_only_loss": self.completion_only_loss,
            "assistant_only_loss": self.assistant_only_loss,
        }

    def encode(self, rows: Iterable[Row], lengths: Lengths) -> Iterator[Example]:
        """Yield the examples of rows, cut at `max_length`, and count their lengths.

        Rows without a token to learn are dropped. Raises JobFailed for a chat that the template
        refuses, and if it marks no assistant.
        """
        for row in rows:
            example = self._example(row, lengths)
            cut = Example(example.ids[: self.max_length], example.learned[: self.max_length])
            lengths.add(len(example.ids), cut.num_learned)
            if cut.num_learned:
                yield cut

    def _example(self, row: Row, lengths: Lengths) -> Example:
        if isinstance(row.learned, str):
            ids, prompt_ids = self._text_ids(row.prompt, row.learned)
        elif self.tokenizer.chat_template:
            ids, prompt_ids = self._chat_and_prompt_ids(row)
        else:
            raise JobFailed(": ".join(NO_TEMPLATE))
        # The completion begins where the tokens differ: some may span the end of the prompt.
        begin = num_shared(prompt_ids, ids)
        if begin < len(prompt_ids):
            lengths.add_divergence(row.place.text, self.tokenizer.decode(prompt_ids[begin:]))
        begin = begin if self.completion_only_loss else 0
        said = self._said(row) if self.assistant_only_loss or row.zero_weight else [1] * len(ids)
        return Example(ids, [0] * begin + said[begin:])

    def _text_ids(self, prompt: Any, learned: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a row, and those of its prompt alone."""
        end = self.tokenizer.eos_token
        learned = learned if learned.endswith(end) else learned + end
        if prompt is None:
            return self.tokenizer(text=learned)["input_ids"], []
        prompt_ids = self.tokenizer(text=prompt)["input_ids"]
        return self.tokenizer(text=prompt + learned)["input_ids"], prompt_ids

    def _chat_and_prompt_ids(self, row: Row) -> tuple[list[int], list[int]]:
        """Return the tokens of a chat, and those of its prompt alone."""
        ids = self._chat_ids(row.whole, row)
        if row.prompt is None:
            return ids, []
        return ids, self._chat_ids(row.opening, row, add_generation_prompt=True)

    def _said(self, row: Row) -> list[int]:
        """Return for each token of a chat whether it is to be learned: 1 or 0.

        With `assistant_only_loss` that is what the assistant says, else all; without messages of
        weight 0.
        """
        # The template has just rendered this chat within its limits.
        mask: list[int] = self.tokenizer.apply_chat_template(
            [*(row.prompt or ()), *row.learned],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            chat_template=self.training_template,
            tools=row.inputs.tools,
            **row.inputs.arguments,
        ).get("assistant_masks", [])
        if 1 not in mask:
            option, value = (
                ("assistant_only_loss", "false") if self.assistant_only_loss else ("weight", "1")
            )
            raise JobFailed(
                f"{option}: must be {value} for this model: its chat template does not mark what "
                "the assistant says ({% generation %})"
            )
        learned = mask if self.assistant_only_loss else [1] * len(mask)
        if not row.zero_weight:
            return learned
        return [
            bit if not at else 0 for bit, at in zip(learned, _zero_weight(mask, row), strict=True)
        ]

    def _chat_ids(
        self, chat: str | Chat, row: Row, *, add_generation_prompt: bool = False
    ) -> list[int]:
        assert isinstance(chat, Chat)
        template = ChatTemplate.of(self.tokenizer)
        if self.training_template is not None:
            template = template.replaced(self.training_template)
        text = chat_templates.render(
            template, chat, field=row.place.text, add_generation_prompt=add_generation_prompt
        )
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _zero_weight(mask: list[int], row: Row) -> list[int]:
    """Return for each token whether a message of weight 0 has it, by the assistant's mask."""
    assert not isinstance(row.learned, str)
    assert not isinstance(row.prompt, str)
    before = sum(message["role"] == ASSISTANT for message in row.prompt or ())
    said = sum(message["role"] == ASSISTANT for message in row.learned)
    begins = [i for i, bit in enumerate(mask) if bit and not (i and mask[i - 1])]
    if len(begins) != before + said:
        raise JobFailed(
            f"{row.place.text}: weight: must be 1 for this model: its chat template does not "
            "separate the messages of the assistant"
        )
    found = [0] * len(mask)
    for index in row.zero_weight:
        at = begins[before + index]
        while at < len(mask) and mask[at]:
            found[at] = 1
            at += 1
    return found
