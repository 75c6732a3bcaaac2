"""Tokens of the rows of a job, on disk: the same rows are tokenized once, and memory-mapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from ..data.corpus import FOLDER, Array, Corpus, Writer, open_or_build, tokenizer_digest
from ..data.lengths import Lengths
from ..errors import JobFailed
from ..models.vocabulary import Vocabulary
from .rows import Row, Rows, RowsDigest

FACTS = 2  # version of the facts of a corpus: increase it with their fields

Report = Callable[[str, int, int | None, str], None]


class Example(Protocol):
    """The tokens of a row as used in training."""

    def columns(self) -> Mapping[str, Sequence[int]]:
        """Return them as sequences of one length."""

    @classmethod
    def of_columns(cls, columns: Mapping[str, Array], /) -> Self:
        """Return the example with these `columns`."""


E = TypeVar("E", bound=Example)
E_co = TypeVar("E_co", bound=Example, covariant=True)


class Encoder(Protocol[E_co]):
    """Tokenizes rows."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, of transformers."""

    @property
    def max_length(self) -> int:
        """The number of tokens at which a row is truncated."""

    @property
    def dtypes(self) -> Mapping[str, str]:
        """The columns of an example with their numpy types."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Everything that the tokens depend on, except rows, tokenizer and `max_length`."""

    def encode(self, rows: Iterable[Any], lengths: Lengths, /) -> Iterator[E_co]:
        """Yield the examples of rows with something to learn, and count the lengths of all."""


@dataclass(frozen=True)
class Examples(Sequence[E], Generic[E]):
    """Examples of a corpus by number; a memory-mapped one is read on access."""

    corpus: Corpus
    numbers: Array  # of the examples
    kind: type[E]

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def lengths(self) -> Array:
        """The tokens of every example."""
        return self.corpus.lengths[self.numbers]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Examples(self.corpus, self.numbers[index], self.kind)
        return self.kind.of_columns(self.corpus.example(self.numbers[index]))


def tokenized(
    cache: Path,
    kind: str,
    rows: Rows[Any],
    how: Encoder[Any],
    check_stop: Callable[[], None],
    report: Report,
    vocabulary: Vocabulary | None,
) -> Corpus:
    """Return the examples of rows from the cache of a home, or tokenize them into it.

    `vocabulary`: of the model, if its tokenizer has tokens beyond it.

    `facts` of the corpus has the lengths of both parts. Raises JobFailed if no row of a part
    has a token to learn, if a token is beyond the model's vocabulary, or if the rows have changed
    meanwhile.
    """

    def build(writer: Writer) -> None:
        digest = RowsDigest()
        for part, is_held_out in ((rows.train, False), (rows.held_out, True)):
            lengths = Lengths(how.max_length)
            latest: list[Row] = []
            observed = _observed(part, is_held_out, digest, latest)
            counted = _counted(observed, len(part), check_stop, report)
            for example in how.encode(counted, lengths):
                if vocabulary is not None:
                    place = latest[0].place
                    vocabulary.check(f"{place.option}: {place.text}", example.columns()["ids"])
                writer.add(example.columns(), held_out=is_held_out)
            if lengths.rows and lengths.rows == lengths.dropped:
                raise JobFailed(
                    "max_length: must leave a token to learn in one row at least, got "
                    f"{how.max_length} for {lengths.rows} rows"
                )
            writer.facts["eval" if is_held_out else "train"] = lengths.facts()
        if digest.hexdigest() != rows.fingerprint:
            raise JobFailed("dataset: must not change while it is read, got other rows")

    key = {
        "kind": kind,
        "rows": rows.fingerprint,
        "tokenizer": tokenizer_digest(how.tokenizer),
        "special": how.tokenizer.special_tokens_map,
        "max_length": how.max_length,
        "facts": FACTS,
        "columns": list(how.dtypes),
        **how.identity,
    }
    if vocabulary is not None:  # models of a larger vocabulary may share the tokenizer
        key["vocabulary"] = vocabulary.size
    return open_or_build(cache / FOLDER, key, how.dtypes, build, check_stop)


def _observed(
    rows: Iterable[Row], is_held_out: bool, digest: RowsDigest, latest: list[Row]
) -> Iterator[Row]:
    """Yield rows; add each to the digest, and keep the latest one in `latest`, for its place."""
    for row in rows:
        digest.add([(row, is_held_out)])
        latest[:] = [row]
        yield row


def _counted(
    rows: Iterable[Row], total: int, check_stop: Callable[[], None], report: Report
) -> Iterator[Row]:
    for done, row in enumerate(rows):
        check_stop()
        report("tokenizing", done, total, "rows")
        yield row
