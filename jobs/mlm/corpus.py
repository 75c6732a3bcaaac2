"""Training corpora: token arrays on disk, built once and memory-mapped by every job.

The folder of a corpus is named by a hash of its inputs (content of the data, tokenizer, lengths),
so it is never stale. An example has columns of equal length (`ids`, and others per token).
Imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

import numpy as np
import orjson
from numpy.typing import NDArray
from tokenizers.processors import TemplateProcessing

from ..codegraph.python_graph import Module, find_sources, read_modules
from ..codegraph.sequences import CLS_ID, SEP_ID, build_examples, train_tokenizer
from ..errors import JobFailed, SpecError
from ..files.atomic import whole_folder
from ..files.documents import documents, text_files

SCHEMA = 1  # of the files below; part of every name
TOKENIZER = "tokenizer"  # in a corpus: the folder of the one that was trained for it
_BLOCK_BYTES = 1 << 24

Array = NDArray[Any]


@dataclass(frozen=True)
class Corpus:
    """Memory-mapped examples; the train/validation split is by document."""

    folder: Path
    columns: Mapping[str, Array]  # each of all examples, one after another: (num_tokens,)
    offsets: Array  # (num_examples + 1,) int64: where an example begins
    train: Array  # int64: the numbers of the examples to train on
    validation: Array  # int64: of those that are held out
    facts: Mapping[str, Any]  # statistics of the builder
    is_new: bool  # whether this call has built it

    @property
    def name(self) -> str:
        """The hash of its inputs."""
        return self.folder.name

    @property
    def lengths(self) -> Array:
        """The tokens of every example."""
        return np.diff(self.offsets)

    def example(self, number: int) -> dict[str, Array]:
        """Return the columns of one example."""
        begin, end = self.offsets[number], self.offsets[number + 1]
        return {name: column[begin:end] for name, column in self.columns.items()}


class Writer:
    """Writes the examples of a corpus sequentially, without holding them in memory."""

    def __init__(self, folder: Path, dtypes: Mapping[str, str]) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {}
        self._dtypes = dtypes
        self._files: dict[str, BinaryIO] = {}
        self._lengths: list[int] = []
        self._held_out: list[bool] = []

    def __enter__(self) -> Self:
        self._files = {name: (self.folder / f"{name}.bin").open("wb") for name in self._dtypes}
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, example: Mapping[str, Any], *, held_out: bool) -> None:
        """Write an example: one sequence per column, all of one length."""
        (length,) = {len(values) for values in example.values()}
        for name, dtype in self._dtypes.items():
            self._files[name].write(np.asarray(example[name], dtype).tobytes())
        self._lengths.append(length)
        self._held_out.append(held_out)

    def finish(self) -> None:
        """Write the index files."""
        np.save(self.folder / "lengths.npy", np.array(self._lengths, np.int32))
        np.save(self.folder / "held_out.npy", np.array(self._held_out, np.bool_))
        (self.folder / "corpus.json").write_bytes(
            orjson.dumps({"dtypes": dict(self._dtypes), "facts": self.facts})
        )


def open_or_build(
    cache: Path,
    key: Mapping[str, Any],
    dtypes: Mapping[str, str],
    build: Callable[[Writer], None],
    check_stop: Callable[[], None],
) -> Corpus:
    """Return the corpus of `key` from `cache`, or build it with `build`.

    A second process that needs the same corpus waits for the first; `check_stop` is called
    meanwhile and raises when the job is to stop. Raises JobFailed for a corpus without training
    examples.
    """
    digest = hashlib.sha256(orjson.dumps([SCHEMA, key], option=orjson.OPT_SORT_KEYS)).hexdigest()
    folder = cache / digest[:32]
    found = _open(folder, is_new=False)
    if found is not None:
        return found
    is_new = False
    with suppress(_BuiltMeanwhile), whole_folder(folder, while_waiting=check_stop) as staging:
        if _open(folder, is_new=False) is not None:
            raise _BuiltMeanwhile
        with Writer(staging, dtypes) as writer:
            build(writer)
            writer.finish()
        if not any(not is_held_out for is_held_out in writer._held_out):
            raise JobFailed("data: it has no example to train on")
        is_new = True
    corpus = _open(folder, is_new=is_new)
    assert corpus is not None
    return corpus


class _BuiltMeanwhile(Exception):
    """Another process built the corpus; leaves `whole_folder` without replacing it."""


def _open(folder: Path, *, is_new: bool) -> Corpus | None:
    """Map a corpus; return None when it is missing or incomplete."""
    try:
        about = orjson.loads((folder / "corpus.json").read_bytes())
        offsets = np.concatenate(([0], np.cumsum(np.load(folder / "lengths.npy"), dtype=np.int64)))
        held_out = np.load(folder / "held_out.npy")
        columns = {
            name: np.memmap(folder / f"{name}.bin", dtype, "r", shape=(int(offsets[-1]),))
            for name, dtype in about["dtypes"].items()
        }
    except (OSError, ValueError, KeyError):
        return None
    return Corpus(
        folder=folder,
        columns=columns,
        offsets=offsets,
        train=np.flatnonzero(~held_out),
        validation=np.flatnonzero(held_out),
        facts=about["facts"],
        is_new=is_new,
    )


# The split.


def digest(content: str | bytes) -> int:
    """Return a 64-bit hash of a document."""
    content = content.encode(errors="replace") if isinstance(content, str) else content
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")


def held_out(digests: Iterable[int], share: float) -> frozenset[int]:
    """Choose the documents to hold out: a fraction of the distinct ones, by their digests.

    Equal documents are on the same side. At least one is held out when `share` > 0 and there are
    two, and at least one is left for training.
    """
    different = sorted(set(digests))
    count = min(max(round(share * len(different)), int(share > 0)), len(different) - 1)
    return frozenset(different[: max(count, 0)])


# From data to examples.


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The inputs of a corpus."""

    data: Path
    tokenizer: Any | None  # of transformers; None: to be trained on what is not held out
    vocab_size: int  # of a tokenizer to be trained
    seq_len: int  # most tokens of an example
    share: float  # of the documents, to hold out
    check_stop: Callable[[], None]  # called periodically; raises when the job is to stop

    def key(self, kind: str, files: Sequence[Path]) -> dict[str, Any]:
        """Return the inputs of the corpus as plain values."""
        return {
            "kind": kind,
            "data": fingerprint(files, self.data, self.check_stop),
            "tokenizer": self.vocab_size if self.tokenizer is None else _identity(self.tokenizer),
            "seq_len": self.seq_len,
            "share": self.share,
        }

    def tokenizer_of(self, writer: Writer, texts: Iterable[str]) -> Any:
        """Return the given tokenizer, or else one trained on `texts` and saved with the corpus."""
        if self.tokenizer is not None:
            return self.tokenizer
        tokenizer = as_pretrained(train_tokenizer(texts, self.vocab_size))
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


def _identity(tokenizer: Any) -> str:
    """Return a hash of a tokenizer without its truncation and padding state."""
    core = orjson.loads(tokenizer.backend_tokenizer.to_str())
    core |= {"truncation": None, "padding": None}
    return hashlib.sha256(orjson.dumps(core, option=orjson.OPT_SORT_KEYS)).hexdigest()


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
        sides = held_out(map(digest, documents(recipe.data)), recipe.share)
        train = (text for text in documents(recipe.data) if digest(text) not in sides)
        tokenizer = recipe.tokenizer_of(writer, train)
        num_documents = 0
        for text in documents(recipe.data):
            recipe.check_stop()
            num_documents += 1
            is_held_out = digest(text) in sides
            for ids in _pieces(text, tokenizer, recipe.seq_len):
                writer.add({"ids": ids}, held_out=is_held_out)
        writer.facts = {"documents": num_documents}

    files = text_files(recipe.data) if recipe.data.is_dir() else [recipe.data]
    return open_or_build(cache, recipe.key("text", files), {"ids": "<i4"}, build, recipe.check_stop)


def check_texts(data: Path) -> None:
    """Check that the first document can be read. Raises SpecError."""
    if not data.exists():
        raise SpecError("data", f"must be a text or JSONL file or a folder, got {str(data)!r}")
    if next(documents(data), None) is None:
        raise SpecError("data", f"must hold text, got {str(data)!r}, which has none")


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

    An example has code of one file; its chains go through the files of its own side of the split.
    """

    def build(writer: Writer) -> None:
        skipped: list[str] = []
        modules = []
        for module in read_modules(files, recipe.data, on_skip=lambda p, _: skipped.append(str(p))):
            recipe.check_stop()
            modules.append(module)
        digests = [digest((recipe.data / module.file).read_bytes()) for module in modules]
        sides = held_out(digests, recipe.share)
        by_side: dict[bool, list[Module]] = {False: [], True: []}
        for module, number in zip(modules, digests, strict=True):
            by_side[number in sides].append(module)
        tokenizer = recipe.tokenizer_of(writer, _texts(by_side[False]))
        for is_held_out, of_side in by_side.items():
            examples = build_examples(
                [triple for module in of_side for triple in module.triples],
                [block for module in of_side for block in module.blocks],
                tokenizer.backend_tokenizer,
                seq_len=recipe.seq_len,
            )
            for _, example in examples:
                recipe.check_stop()
                writer.add(example._asdict(), held_out=is_held_out)
        writer.facts = {
            "documents": len(modules),
            "skipped": len(skipped),
            "triples": sum(len(module.triples) for module in modules),
        }

    files = find_sources(recipe.data)
    dtypes = {
        "ids": "<i4",
        "rel_ids": "<u1",
        "chain_ids": "<u2",
        "depth_ids": "<u1",
        "role_ids": "<u1",
    }
    return open_or_build(cache, recipe.key("graph", files), dtypes, build, recipe.check_stop)


def check_sources(data: Path) -> None:
    """Check that there is a Python file. Raises SpecError."""
    if not data.is_dir() or not find_sources(data):
        raise SpecError("data", f"must be a folder of Python sources, got {str(data)!r}")


def _texts(modules: Iterable[Module]) -> Iterator[str]:
    for module in modules:
        yield from (block.text for block in module.blocks if block.name == module.name)
        yield from (f"{triple.head} {triple.tail}" for triple in module.triples)
