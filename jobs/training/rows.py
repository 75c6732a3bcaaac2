"""Rows of a data set: checked, divided into those to train on and those held out.

Each kind defines its format of a row in a subclass of RowSource. Rows are read at submission, to
check a job before it is queued, and again in the work horse; memory holds one of them at a time.
Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import orjson

from ..context import RULES
from ..data.columns import Columns
from ..data.former import Former
from ..data.held_out import split
from ..data.reader import Reader, Reading
from ..errors import SpecError
from ..files import jsonl
from ..files.chats import Chat, Messages, read_messages

_BOUNDARY = b"null\n"  # in a digest, between the rows to train on and those held out


class Row(Protocol):
    """One row of a data set, as a kind uses it."""

    @property
    def place(self) -> jsonl.Place:
        """Where it is in its file."""

    @property
    def is_chat(self) -> bool:
        """Whether it goes through the chat template."""

    @property
    def opening(self) -> str | Chat:
        """Its prompt, or all of a row that is learned as a whole."""

    @property
    def parts(self) -> frozenset[str]:
        """What the chat template must know: see Chat.parts."""

    @property
    def content(self) -> list[Any]:
        """The content to learn, as plain JSON values."""


R = TypeVar("R", bound=Row)


@dataclass(frozen=True)
class Part(Generic[R]):
    """Rows of a data set, read again whenever they are iterated over."""

    source: RowSource[R]
    option: str  # that names the data set
    path: str
    first: int  # usable rows before them
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[R]:
        rows = self.source.rows(self.option, self.path, self.source.reading())
        return islice(rows, self.first, self.first + self.count)


@dataclass(frozen=True)
class Rows(Generic[R]):
    """The rows that a job uses, all of them checked."""

    train: Part[R]
    held_out: Part[R]
    reading: Reading
    has_chats: bool  # whether a row goes through the chat template
    parts: Mapping[frozenset[str], str]  # of chats (Chat.parts) -> the first of these rows
    fingerprint: str  # see RowsDigest
    num_shared: int  # held-out rows that are equal to a row to train on


class RowsDigest:
    """The sha256 of the rows that a job uses, in their order: those to train on come first.

    `counts_shared`: whether held-out rows that are also trained on are counted.
    """

    def __init__(self, *, counts_shared: bool = False) -> None:
        self.has_chats = False
        self.parts: dict[frozenset[str], str] = {}  # see Rows
        self.num_shared = 0
        self._trained: set[int] | None = set() if counts_shared else None  # hashes of rows
        self._is_training = True
        self._digest = sha256()

    def add(self, rows: Iterable[tuple[Row, bool]]) -> tuple[int, int]:
        """Add rows, each with whether it is held out; return how many are not, and how many are."""
        counts = [0, 0]
        for row, is_held_out in rows:
            if is_held_out and self._is_training:
                self._is_training = False
                self._digest.update(_BOUNDARY)
            if row.is_chat:
                self.has_chats = True
                self.parts.setdefault(row.parts, row.place.text)
            line = orjson.dumps(row.content, option=orjson.OPT_SORT_KEYS) + b"\n"
            self._digest.update(line)
            counts[is_held_out] += 1
            if self._trained is None:
                continue
            if is_held_out:
                self.num_shared += hash(line) in self._trained
            else:
                self._trained.add(hash(line))
        return counts[False], counts[True]

    def hexdigest(self) -> str:
        digest = self._digest.copy()
        if self._is_training:
            digest.update(_BOUNDARY)
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class RowSource(ABC, Generic[R]):
    """Where rows come from, and how they are read."""

    dataset: str
    eval_dataset: str | None = None
    samples: int | None = None  # to train on; None: all but those held out
    eval_samples: int | None = 0  # None: all of eval_dataset
    chat_template: bool = False
    system: str | None = None
    skip_bad_rows: bool = False
    columns: Columns = field(default_factory=Columns)
    rules: int = RULES  # version at submission

    known: ClassVar[frozenset[str]]  # the keys of a record that the kind reads

    @abstractmethod
    def row(self, values: Mapping[str, Any], place: jsonl.Place) -> R:
        """Return the row of one record. Raises SpecError."""

    def reading(self) -> Reading:
        """Return the rules for reading records, with counts of what is skipped, all 0."""
        return Reading(self.columns, self.skip_bad_rows, Former.of(self.rules))

    def rows(self, option: str, path: str, reading: Reading) -> Iterator[R]:
        """Yield the usable rows of a data set. Raises SpecError for a bad one."""
        return Reader(self.row, reading, self.known).rows(option, path)

    def load(self) -> Rows[R]:
        """Read and check the rows.

        The held-out rows are the first of `eval_dataset`, or else those of `dataset` after the
        training rows. Raises SpecError, with file, line and field, for an unusable row, and if
        there are fewer rows than requested.
        """
        holds_out = bool(self.eval_samples) or self.eval_dataset is not None
        reading, digest = self.reading(), RowsDigest(counts_shared=holds_out)
        following = 0 if self.eval_dataset is not None else self.eval_samples or 0
        found = self.rows("dataset", self.dataset, reading)
        counts = digest.add(split(found, self.samples, following))
        samples = self._num_trained(*counts, following, reading)
        held_out = Part(self, "dataset", self.dataset, samples, following)
        if self.eval_dataset is not None:
            found = self.rows("eval_dataset", self.eval_dataset, reading)
            _, count = digest.add((row, True) for row in islice(found, self.eval_samples))
            wanted = count if self.eval_samples is None else self.eval_samples
            self._check_count("eval_samples", wanted, count, self.eval_dataset, reading)
            held_out = Part(self, "eval_dataset", self.eval_dataset, 0, count)
        train = Part(self, "dataset", self.dataset, 0, samples)
        found_in_all = digest.has_chats, digest.parts, digest.hexdigest(), digest.num_shared
        return Rows(train, held_out, reading, *found_in_all)

    def _num_trained(self, trained: int, held_out: int, following: int, reading: Reading) -> int:
        """Return the number of rows to train on; `following` are to be held out after them.

        Raises SpecError when there are too few.
        """
        found = trained + held_out
        if self.samples is None and found and not trained:
            raise SpecError(
                "eval_samples",
                f"must be below {found} (the rows of {self.dataset}), got {following}",
            )
        wanted = self.samples or 1
        self._check_count("samples", wanted, found - following, self.dataset, reading, following)
        return trained

    def _check_count(
        self, option: str, wanted: int, found: int, path: str, reading: Reading, others: int = 0
    ) -> None:
        """Check that `wanted` rows of a data set are found, and `others` held out after them."""
        if found + others <= 0:
            raise SpecError(
                "dataset" if option == "samples" else "eval_dataset",
                f"must have a row to learn from, got {path}: {reading.skipped}",
            )
        if found < wanted:
            held_out = f", but for the {others} held out" if others else ""
            raise SpecError(
                option, f"must be at most {found} (the rows of {path}{held_out}), got {wanted}"
            )

    def opened(self, messages: Messages) -> Messages:
        """Return a chat with the system message before it, unless it has one."""
        if self.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system}, *messages]


def prompt_text(value: Any, place: jsonl.Place, *, is_chat: bool) -> str:
    """Return a prompt that is text; it may be blank, unless it becomes a message. Raises SpecError.

    After an empty prompt, a completion is learned from its second token on.
    """
    return value if isinstance(value, str) and not is_chat else jsonl.text(value, place)


def ended_by_assistant(value: Any, place: jsonl.Place) -> Messages:
    """Return chat messages of which the last is an assistant's. Raises SpecError."""
    messages = read_messages(_unweighted(value, place), place)
    role = messages[-1]["role"]
    if role != "assistant":
        raise (
            place.item(len(messages) - 1)
            .field("role")
            .fault("assistant, for the last message", role[:80])
        )
    return messages


def _unweighted(value: Any, place: jsonl.Place) -> Any:
    """Remove OpenAI's `weight` from messages where it has the default value, 1."""
    if not isinstance(value, list):
        return value
    for index, item in enumerate(value):
        if isinstance(item, dict) and item.get("weight", 1) != 1:
            raise place.item(index).field("weight").fault("1 or absent", str(item["weight"])[:80])
    return [
        {k: v for k, v in item.items() if k != "weight"} if isinstance(item, dict) else item
        for item in value
    ]
