"""The options of all kinds that read records. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..files.chats import Chat
from ..files.jsonl import Place
from ..spec import Spec, option
from .columns import Columns

MOST_CHARACTERS = 100_000  # in a text that is repeated in every prompt

Content = str | Chat


@dataclass(frozen=True, kw_only=True)
class RecordsSpec(Spec, ABC):
    """How the records of a data set are read."""

    columns: tuple[str, ...] = option(
        (),
        "column names of the dataset, where they differ from the usual ones: FIELD=COLUMN,… such "
        "as question=problem,answer=solution",
        group="data",
    )
    skip_bad_rows: bool = option(
        False,
        "unusable records are skipped and counted; otherwise the job is refused",
        group="data",
    )

    @property
    def column_names(self) -> Columns:
        """The columns by the fields that they are read for. Raises SpecError."""
        return Columns.parse(self.columns)

    def check(self) -> None:
        super().check()
        Columns.parse(self.columns)

    @abstractmethod
    def content_of(self, values: Mapping[str, Any], place: Place) -> Content:
        """Return the part of a record that is truncated at `cut_at` tokens.

        Raises SpecError for a record that the kind cannot use.
        """

    def prompt_of(
        self, values: Mapping[str, Any], place: Place
    ) -> tuple[Content, Sequence[Content]] | None:
        """Return the prompt of a record, and prompt + completion for each; None without a prompt.

        Raises SpecError for a record that the kind cannot use.
        """
        return None

    def first_prompt(self) -> Content | None:
        """Return the prompt of the first record, with its template, before any chat template.

        A record that is learned as a whole is its own prompt. None for kinds without prompts.
        Raises SpecError.
        """
        return None

    @abstractmethod
    def cut_at(self, positions: int | None) -> int | None:
        """Return the maximum length in tokens for a model with `positions`; None: no limit."""


@dataclass(frozen=True, kw_only=True)
class ChatRecordsSpec(RecordsSpec, ABC):
    """How records become chats."""

    chat_template: bool = option(
        False, "chat template of the tokenizer, applied to plain prompts", group="data"
    )
    system: str | None = option(
        None, "system message at the start of a chat", group="data", longest=MOST_CHARACTERS
    )
