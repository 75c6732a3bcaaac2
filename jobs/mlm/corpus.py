"""Builds the examples of a corpus from documents and Python sources. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import orjson
from tokenizers.processors import TemplateProcessing

from ..codegraph.python_graph import read_modules, sources_in
from ..codegraph.sequences import CLS_ID, SEP_ID, build_examples, train_tokenizer
from ..codegraph.syntax_reader import Module
from ..context import RULES
from ..data import left_out, texts
from ..data.columns import Columns
from ..data.corpus import Corpus, Writer, open_or_build, tokenizer_digest
from ..data.former import Former
from ..data.held_out import digest, split_by_content
from ..data.reader import Reading
from ..errors import SpecError

TOKENIZER = "tokenizer"  # in a corpus: the folder of the one that was trained for it
_BLOCK_BYTES = 1 << 24

Item = TypeVar("Item")


# From data to examples.


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The inputs of a corpus."""

    data: Path
    tokenizer: Any | None  # of transformers; None: train one on the documents that are not held out
    vocab_size: int  # of a tokenizer to be trained
    seq_len: int  # most tokens of an example
    share: float  # of the documents, to hold out, unless there is `held_out_data`
    check_stop: Callable[[], None]  # called periodically; raises when the job is to stop
    # Called with an activity, the number done, the total (None: unknown), and the unit.
    report: Callable[[str, int, int | None, str], None] = lambda *_: None
    columns: Columns = field(default_factory=Columns)  # of records
    skip_bad_rows: bool = False
    held_out_data: Path | None = None  # the documents to hold out; None: a share of `data`
    former: Former | None = None  # the rules of a job that an earlier version began

    def reading(self) -> Reading:
        """Return the options of the record reader, with counters of what it leaves out."""
        return Reading(self.columns, self.skip_bad_rows, self.former)

    def _again(self) -> Reading:
        """Return the same options for a further pass over the data, whose counters are not used."""
        former = None if self.former is None else Former()
        return Reading(self.columns, self.skip_bad_rows, former)

    def counted(
        self,
        activity: str,
        items: Iterable[Item],
        total: int | None = None,
        unit: str = "documents",
    ) -> Iterator[Item]:
        """Yield the items, and report how many there were."""
        done = 0
        self.report(activity, done, total, unit)
        for done, item in enumerate(items, 1):
            self.check_stop()
            yield item
            self.report(activity, done, total, unit)

    def texts(self, reading: Reading | None = None) -> Iterator[str]:
        """Yield the documents of text data; `reading` counts skipped records. Raises SpecError."""
        reading = reading or self._again()
        return texts.read("data", str(self.data), reading)

    def held_out_texts(self, reading: Reading | None = None) -> Iterator[str]:
        """Yield the documents of `held_out_data`; none without it. Raises SpecError."""
        if self.held_out_data is None:
            return iter(())
        reading = reading or self._again()
        return texts.read("eval_dataset", str(self.held_out_data), reading)

    def key(
        self, kind: str, root: Path, files: Sequence[Path], apart: tuple[Path, list[Path]] | None
    ) -> dict[str, Any]:
        """Return the inputs of the corpus as plain values.

        `apart`: where `held_out_data` is, and its files.
        """
        held_out = None if apart is None else fingerprint(apart[1], apart[0], self.check_stop)
        how = {"columns": dict(self.columns.names), "skip_bad_rows": self.skip_bad_rows}
        return {
            "kind": kind,
            "data": fingerprint(files, root, self.check_stop),
            **{name: value for name, value in how.items() if value},
            "tokenizer": self.vocab_size
            if self.tokenizer is None
            else tokenizer_digest(self.tokenizer),
            "seq_len": self.seq_len,
            "share": self.share,
            **({} if held_out is None else {"held_out": held_out}),
        }

    def tokenizer_of(self, writer: Writer, known: Iterable[str]) -> Any:
        """Return the given tokenizer, or one trained on `known` and saved with the corpus."""
        if self.tokenizer is not None:
            return self.tokenizer
        tokenizer = as_pretrained(train_tokenizer(known, self.vocab_size))
        tokenizer.save_pretrained(writer.folder / TOKENIZER)
        return tokenizer


def fingerprint(files: Sequence[Path], root: Path, check_stop: Callable[[], None]) -> str:
    """Return a hash of the files' content, and of their places below `root`.

    For a file that is `root` itself, only the suffix counts. `check_stop` is called periodically
    and raises when the job is to stop.
    """
    content = [
        (root.suffix if path == root else str(path.relative_to(root)), _sha256(path, check_stop))
        for path in files
    ]
    return hashlib.sha256(orjson.dumps(content)).hexdigest()


def as_pretrained(core: Any) -> Any:
    """Wrap the result of `train_tokenizer` as a tokenizer of transformers.

    Text is encoded as `[CLS] text [SEP]`.
    """
    from transformers import PreTrainedTokenizerFast

    core.post_processor = cast(Any, TemplateProcessing)(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", CLS_ID), ("[SEP]", SEP_ID)],
    )
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "mask")}
    return cast(Any, PreTrainedTokenizerFast)(
        tokenizer_object=core, additional_special_tokens=["[ENT]", "[REL]"], **named
    )


def _sha256(path: Path, check_stop: Callable[[], None]) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            check_stop()
            found.update(block)
    return found.hexdigest()


# Text.


def text_corpus(cache: Path, recipe: Recipe) -> Corpus:
    """Return the documents of `recipe.data` as examples, built once.

    A document longer than `seq_len` becomes several examples, each with the special tokens.
    """

    def build(writer: Writer) -> None:
        reading = recipe.reading()
        digests = list(map(digest, recipe.counted("reading", recipe.texts(reading))))
        num_documents = len(digests)
        apart = frozenset(map(digest, recipe.held_out_texts(reading)))
        sides = apart or split_by_content(digests, recipe.share)

        def read(activity: str) -> Iterator[str]:
            return recipe.counted(activity, recipe.texts(), num_documents)

        train = (text for text in read("training a tokenizer") if digest(text) not in sides)
        tokenizer = recipe.tokenizer_of(writer, train)
        for text in read("tokenizing"):
            is_held_out = digest(text) in sides
            if is_held_out and apart:
                continue  # it is among the held-out documents, once
            for ids in _pieces(text, tokenizer, recipe.seq_len):
                writer.add({"ids": ids}, held_out=is_held_out)
        for text in recipe.counted("tokenizing", recipe.held_out_texts()):
            for ids in _pieces(text, tokenizer, recipe.seq_len):
                writer.add({"ids": ids}, held_out=True)
        writer.facts = {"documents": num_documents}
        if reading.num_skipped:
            skipped = {"rows_skipped": reading.num_skipped, "first_fault": reading.first_fault}
            writer.facts |= skipped
        if (note := left_out.of_reading(reading)) is not None:
            writer.facts["left_out"] = note

    others = recipe.held_out_data
    found = None if others is None else texts.files("eval_dataset", str(others), recipe.former)
    key = recipe.key("text", *texts.files("data", str(recipe.data), recipe.former), found)
    if recipe.former is None:  # its values may be read otherwise
        key["rules"] = RULES
    return open_or_build(cache, key, {"ids": "<i4"}, build, recipe.check_stop)


def check_texts(option: str, data: str, reading: Reading) -> None:
    """Check that the first document can be read. Raises SpecError."""
    if not texts.holds_records(option, data) and not Path(data).exists():
        raise SpecError(option, f"must be {texts.TAKES}, got {data!r}")
    if next(texts.read(option, data, reading), None) is None:
        raise SpecError(option, f"must hold text, got {data!r}, which has none")


def _pieces(text: str, tokenizer: Any, seq_len: int) -> list[list[int]]:
    pieces: list[list[int]] = tokenizer(
        text,
        truncation=True,
        max_length=seq_len,
        return_overflowing_tokens=True,
        return_attention_mask=False,
    )["input_ids"]
    return pieces


# Python sources with their graph.


def graph_corpus(cache: Path, recipe: Recipe) -> Corpus:
    """Return the code and the knowledge graph of the Python sources of a folder, built once.

    An example has code of one file; its chains only use files on the same side of the split.
    """

    def build(writer: Writer) -> None:
        skipped: list[str] = []
        paths = recipe.counted("parsing", files, len(files), "files")
        modules = list(
            read_modules(paths, recipe.data, on_skip=lambda p, _: skipped.append(str(p)))
        )
        digests = [digest((recipe.data / module.file).read_bytes()) for module in modules]
        by_side: dict[bool, list[Module]] = {False: [], True: []}
        if recipe.held_out_data is None:
            sides = split_by_content(digests, recipe.share)
        else:
            sides = frozenset(digest(path.read_bytes()) for path in others)
            apart = read_modules(others, recipe.held_out_data, on_skip=lambda *_: None)
            by_side[True] = list(apart)
        for module, number in zip(modules, digests, strict=True):
            if recipe.held_out_data is None or number not in sides:
                by_side[number in sides].append(module)
        known = recipe.counted("training a tokenizer", _texts(by_side[False]), unit="texts")
        tokenizer = recipe.tokenizer_of(writer, known)
        for is_held_out, of_side in by_side.items():
            examples = build_examples(
                [triple for module in of_side for triple in module.triples],
                [block for module in of_side for block in module.blocks],
                tokenizer.backend_tokenizer,
                seq_len=recipe.seq_len,
            )
            for _, example in recipe.counted("tokenizing", examples, unit="examples"):
                writer.add(example._asdict(), held_out=is_held_out)
        writer.facts = {
            "documents": len(modules),
            "skipped": len(skipped),
            "triples": sum(len(module.triples) for module in modules),
        }

    files = sources_in("data", recipe.data).files
    others = (
        []
        if recipe.held_out_data is None
        else sources_in("eval_dataset", recipe.held_out_data).files
    )
    found = None if recipe.held_out_data is None else (recipe.held_out_data, others)
    dtypes = {
        "ids": "<i4",
        "rel_ids": "<u1",
        "chain_ids": "<u2",
        "depth_ids": "<u1",
        "role_ids": "<u1",
    }
    return open_or_build(
        cache, recipe.key("graph", recipe.data, files, found), dtypes, build, recipe.check_stop
    )


def check_sources(option: str, data: Path) -> None:
    """Check that there is a Python file. Raises SpecError."""
    if not data.is_dir() or not sources_in(option, data).files:
        raise SpecError(
            option,
            f"must be a folder of Python sources, got {str(data)!r}; for text: --objective mlm",
        )


def _texts(modules: Iterable[Module]) -> Iterator[str]:
    for module in modules:
        yield from (block.text for block in module.blocks if block.name == module.name)
        yield from (f"{triple.head} {triple.tail}" for triple in module.triples)
