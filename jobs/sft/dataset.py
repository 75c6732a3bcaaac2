"""Rows of a JSONL file for supervised fine-tuning, and the tokens that a model learns from them.

A row is one of four forms:

    {"prompt": …, "completion": …}     texts, or lists of chat messages
    {"messages": […]}                  a chat that ends with an assistant
    {"question": …, "answer": …}       the question is put into a template
    {"text": …}                        learned as a whole

Rows are read in the shell, to check a job before it is queued, and again in the work horse.
Tokens are those of TRL's SFTTrainer. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import Any

import orjson

from ..errors import JobFailed, SpecError
from ..files import jsonl
from ..models.chat_templates import NO_TEMPLATE
from ..training.options import DEFAULT_TEMPLATE

IGNORED = -100  # label of a token that is not learned
HISTOGRAM = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # tokens, inclusive

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Row:
    """What one row teaches: a completion after its prompt, a whole chat, or a whole text."""

    place: jsonl.Place
    prompt: str | Messages | None  # None: `learned` is all there is
    learned: str | Messages

    @property
    def is_chat(self) -> bool:
        """Whether it goes through the chat template."""
        return not isinstance(self.learned, str)


@dataclass(frozen=True)
class Rows:
    """The rows that a job uses, and how many of the file were passed over as unusable."""

    train: list[Row]
    held_out: list[Row]
    num_skipped: int
    first_fault: str | None  # of the first row that was passed over

    @property
    def fingerprint(self) -> str:
        """The sha256, in hex, of the rows in their order."""
        digest = sha256()
        for row in [*self.train, None, *self.held_out]:
            content = None if row is None else [row.prompt, row.learned]
            digest.update(orjson.dumps(content, option=orjson.OPT_SORT_KEYS) + b"\n")
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where rows come from, and how they are read."""

    dataset: str
    eval_dataset: str | None = None
    samples: int | None = None  # to train on; None: all but those held out
    eval_samples: int | None = 0  # None: all of eval_dataset
    template: str = DEFAULT_TEMPLATE
    chat_template: bool = False
    system: str | None = None
    assistant_only_loss: bool = False
    skip_bad_rows: bool = False

    def load(self) -> Rows:
        """Read and check the rows.

        Those held out are the first of `eval_dataset`, or else those of `dataset` after the
        training's. Raises SpecError, by file, line and field, for a row that cannot be learned
        from, and where there are fewer rows than asked for.
        """
        reader = _Reader(self)
        if self.eval_dataset is not None:
            train = reader.take("dataset", self.dataset, "samples", self.samples)
            held_out = reader.take(
                "eval_dataset", self.eval_dataset, "eval_samples", self.eval_samples
            )
            return Rows(train, held_out, reader.num_skipped, reader.first_fault)
        num_held_out = self.eval_samples or 0
        wanted = None if self.samples is None else self.samples + num_held_out
        found = reader.take("dataset", self.dataset, "samples", wanted, of_both=num_held_out)
        if len(found) <= num_held_out:
            raise SpecError(
                "eval_samples",
                f"must be below {len(found)} (the rows of {self.dataset}), got {num_held_out}",
            )
        cut = len(found) - num_held_out
        return Rows(found[:cut], found[cut:], reader.num_skipped, reader.first_fault)


class _Reader:
    """Reads rows, and counts those that it passes over."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.num_skipped = 0
        self.first_fault: str | None = None

    def take(
        self, option: str, path: str, count_option: str, count: int | None, *, of_both: int = 0
    ) -> list[Row]:
        rows = list(islice(self._rows(option, path), count))
        if not rows or (count is not None and len(rows) < count):
            if not rows:
                raise SpecError(option, f"must have a row to learn from, got {path}: {self._why()}")
            most = len(rows) - of_both
            held_out = f", but for the {of_both} held out" if of_both else ""
            raise SpecError(
                count_option,
                f"must be at most {most} (the rows of {path}{held_out}), "
                f"got {(count or 0) - of_both}",
            )
        return rows

    def _why(self) -> str:
        return f"{self.num_skipped} bad rows, the first: {self.first_fault}"

    def _rows(self, option: str, path: str) -> Iterator[Row]:
        for place, line in jsonl.lines(option, path):
            try:
                yield self._row(jsonl.parse(line, place), place)
            except SpecError as error:
                if not self.source.skip_bad_rows:
                    raise
                self.num_skipped += 1
                self.first_fault = self.first_fault or str(error)

    def _row(self, values: Mapping[str, Any], place: jsonl.Place) -> Row:
        if "messages" in values:
            return Row(place, None, self._chat(values["messages"], place.field("messages")))
        if "prompt" in values:
            row = self._prompt_row(values, place)
        elif "question" in values:
            question = jsonl.text(values["question"], place.field("question"))
            answer = _answer(values, place)
            row = self._plain(self.source.template.replace("{question}", question), answer, place)
        elif "text" in values:
            row = Row(place, None, jsonl.text(values["text"], place.field("text")))
        else:
            raise place.fault(
                "an object with prompt and completion, messages, question and answer, or text",
                jsonl.keys_of(dict(values)),
            )
        if self.source.assistant_only_loss and not row.is_chat:
            raise place.fault("a chat (messages) for assistant_only_loss", "text")
        return row

    def _prompt_row(self, values: Mapping[str, Any], place: jsonl.Place) -> Row:
        prompt, completion = values["prompt"], values.get("completion")
        if completion is None:
            raise place.fault(
                "an object with a completion for its prompt", jsonl.keys_of(dict(values))
            )
        of_prompt, of_completion = place.field("prompt"), place.field("completion")
        if isinstance(prompt, list):
            opening = self._opened(jsonl.messages(prompt, of_prompt))
            return Row(place, opening, _ended(completion, of_completion))
        text = jsonl.text(prompt, of_prompt)
        return self._plain(text, jsonl.text(completion, of_completion), place, is_joined=True)

    def _plain(
        self, prompt: str, completion: str, place: jsonl.Place, *, is_joined: bool = False
    ) -> Row:
        if self.source.chat_template:
            opening = self._opened([{"role": "user", "content": prompt}])
            return Row(place, opening, [{"role": "assistant", "content": completion}])
        space = "" if is_joined or prompt[-1:].isspace() else " "
        return Row(place, prompt, space + completion)

    def _chat(self, value: Any, place: jsonl.Place) -> Messages:
        return self._opened(_ended(value, place))

    def _opened(self, messages: Messages) -> Messages:
        if self.source.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.source.system}, *messages]


def _ended(value: Any, place: jsonl.Place) -> Messages:
    """Return chat messages of which the last is an assistant's. Raises SpecError."""
    messages = jsonl.messages(_unweighted(value, place), place)
    role = messages[-1]["role"]
    if role != "assistant":
        raise (
            place.item(len(messages) - 1)
            .field("role")
            .fault("assistant, for the last message", role[:80])
        )
    return messages


def _unweighted(value: Any, place: jsonl.Place) -> Any:
    """Drop OpenAI's `weight` from messages where it says what is so anyway: 1."""
    if not isinstance(value, list):
        return value
    for index, item in enumerate(value):
        if isinstance(item, dict) and item.get("weight", 1) != 1:
            raise place.item(index).field("weight").fault("1 or absent", str(item["weight"])[:80])
    return [
        {k: v for k, v in item.items() if k != "weight"} if isinstance(item, dict) else item
        for item in value
    ]


def _answer(values: Mapping[str, Any], place: jsonl.Place) -> str:
    if "answer" not in values:
        raise place.fault("an object with an answer for its question", jsonl.keys_of(dict(values)))
    answer = values["answer"]
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return orjson.dumps(answer).decode()
    return jsonl.text(answer, place.field("answer"))


# Tokens.


@dataclass(frozen=True)
class Example:
    """The tokens of a row, and for each of them itself or IGNORED."""

    ids: list[int]
    labels: list[int]

    @property
    def num_learned(self) -> int:
        """The tokens with a loss: the first one is never predicted."""
        return sum(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True)
class Lengths:
    """Lengths of the rows in tokens, before truncation except where noted."""

    rows: int
    tokens: int
    learned_tokens: int  # tokens with a loss, after truncation
    mean: float
    longest: int
    truncated: int
    dropped: int  # rows of which nothing is left to learn
    histogram: dict[str, int]  # rows by "≤ tokens"


@dataclass(frozen=True)
class Tokenization:
    """How rows become tokens."""

    tokenizer: Any
    max_length: int
    completion_only_loss: bool = True
    assistant_only_loss: bool = False
    training_template: str | None = None  # in place of the tokenizer's own, to mark the assistant

    def encode(self, rows: Sequence[Row]) -> tuple[list[Example], Lengths]:
        """Return the examples of rows, cut at `max_length`, and their lengths.

        Rows of which no token is left to learn are dropped. Raises JobFailed for a chat that the
        template refuses, and where it marks no assistant.
        """
        found: list[Example] = []
        lengths: list[int] = []
        for row in rows:
            example = self._example(row)
            lengths.append(len(example.ids))
            cut = Example(example.ids[: self.max_length], example.labels[: self.max_length])
            if cut.num_learned:
                found.append(cut)
        return found, Lengths(
            rows=len(rows),
            tokens=sum(lengths),
            learned_tokens=sum(example.num_learned for example in found),
            mean=sum(lengths) / max(len(lengths), 1),
            longest=max(lengths, default=0),
            truncated=sum(length > self.max_length for length in lengths),
            dropped=len(rows) - len(found),
            histogram=_histogram(lengths),
        )

    def _example(self, row: Row) -> Example:
        if isinstance(row.learned, str):
            return self._text_example(row.prompt, row.learned)
        if not self.tokenizer.chat_template:
            raise JobFailed(": ".join(NO_TEMPLATE))
        try:
            return self._chat_example(row.prompt, row.learned)
        except JobFailed:
            raise
        except Exception as error:  # a template is a program: it raises anything
            raise JobFailed(f"{row.place.text}: the chat template says: {error}") from error

    def _text_example(self, prompt: Any, learned: str) -> Example:
        end = self.tokenizer.eos_token
        learned = learned if learned.endswith(end) else learned + end
        if prompt is None:
            ids = self.tokenizer(text=learned)["input_ids"]
            return Example(ids, list(ids))
        alone = self.tokenizer(text=prompt)["input_ids"]
        ids = self.tokenizer(text=prompt + learned)["input_ids"]
        return Example(ids, self._labels(ids, alone))

    def _chat_example(self, prompt: Any, learned: Messages) -> Example:
        done = self.tokenizer.apply_chat_template(
            (prompt or []) + learned,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=self.assistant_only_loss,
            chat_template=self.training_template,
        )
        ids: list[int] = done["input_ids"]
        labels = list(ids)
        if prompt is not None:
            alone = self.tokenizer.apply_chat_template(
                prompt,
                tokenize=True,
                return_dict=True,
                add_generation_prompt=True,
                chat_template=self.training_template,
            )["input_ids"]
            labels = self._labels(ids, alone)
        if self.assistant_only_loss:
            mask = done.get("assistant_masks", [])
            if 1 not in mask:
                raise JobFailed(
                    "assistant_only_loss: must be false for this model: its chat template does not "
                    "mark what the assistant says ({% generation %})"
                )
            labels = [label if bit else IGNORED for label, bit in zip(labels, mask, strict=True)]
        return Example(ids, labels)

    def _labels(self, ids: list[int], prompt: Iterable[int]) -> list[int]:
        if not self.completion_only_loss:
            return list(ids)
        # The completion begins where the tokens differ: some may span the end of the prompt.
        begin = 0
        for one, other in zip(prompt, ids, strict=False):
            if one != other:
                break
            begin += 1
        return [IGNORED] * begin + ids[begin:]


def _histogram(lengths: Iterable[int]) -> dict[str, int]:
    counts = dict.fromkeys((*HISTOGRAM, 0), 0)
    for length in lengths:
        counts[next((limit for limit in HISTOGRAM if length <= limit), 0)] += 1
    names = {limit: f"<={limit}" if limit else f">{HISTOGRAM[-1]}" for limit in counts}
    return {names[limit]: count for limit, count in counts.items() if count}
