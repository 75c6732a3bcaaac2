"""The encode kind: embeddings of texts, or of modules, classes and functions of Python code.

With a query it computes a score per text instead, by a cross-encoder.

`options.py` has its options, `passages.py` reads the passages, `embedder.py` and `cross_encoder.py`
hold the parts that need torch, and `journal.py` writes the vectors and scores. A killed job resumes
after the last passage in the journal.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from ...configs.precision import NATIVE
from ..context import Context, WarmModel
from ..errors import JobFailed, Stopped
from ..files import umask
from .options import CODE_GRAPH, EncodeSpec

if TYPE_CHECKING:
    from .journal import Floats, Journal
    from .passages import Passage
    from .text_encoder import TextEncoder, TokenizedPassage

MOST_NUMBERS = 32_768  # of the vectors in a result: 42 of 768
EVENT_S = 1.0  # between two events of progress
AT_ONCE = 256  # passages tokenized between two checks for a stop request


def run(spec: EncodeSpec, ctx: Context) -> dict[str, Any]:
    """Encode every passage that is not in the journal of an earlier execution.

    Returns counts, timings, and the embeddings or scores or the file that holds them. Raises
    Stopped and JobFailed.
    """
    from .journal import Journal
    from .passages import identity

    begun = time.perf_counter()
    warm = ctx.models.take(spec.model)
    encoder = _encoder(spec, ctx, warm)
    is_code = warm.model.config.model_type == CODE_GRAPH
    passages, left_out = _passages(spec, ctx, encoder, is_code=is_code)
    digest = hashlib.sha256(identity(passages) + _identity(spec, warm, encoder)).digest()
    read_done = time.perf_counter()
    with Journal(ctx.run_dir / "vectors.bin", digest, encoder.width) as journal:
        work = _Work(spec, ctx, encoder, passages, journal)
        work.encode(left_out)
        result = work.result()
        written = time.perf_counter()
        result |= _deliver(spec, ctx, passages, journal)
        journal.remove()
    result["timings"]["read_s"] = read_done - begun
    result["timings"]["write_s"] = time.perf_counter() - written
    return result


def _encoder(spec: EncodeSpec, ctx: Context, warm: WarmModel) -> TextEncoder:
    from .cross_encoder import CrossEncoder
    from .embedder import Embedder

    if spec.query is not None:
        return CrossEncoder(
            warm,
            query=spec.query,
            passage_length=spec.passage_length,
            max_length=spec.max_length,
            truncates=spec.truncate,
            device=ctx.device,
        )
    return Embedder(
        warm,
        pooling=spec.pooling,
        normalize=spec.normalize,
        dimensions=spec.dimensions,
        max_length=spec.max_length,
        truncates=spec.truncate,
        is_int8=_is_int8(spec, ctx),
        device=ctx.device,
    )


def _passages(
    spec: EncodeSpec, ctx: Context, encoder: TextEncoder, *, is_code: bool
) -> tuple[list[Passage], str | None]:
    """Return what is to be encoded, and what of the input is left out."""
    from ..data.reader import Reading
    from . import passages

    if spec.tokens:
        return passages.from_ids(spec.token_ids), None
    if spec.input is None:
        return passages.from_texts(spec.text), None
    path, reading = Path(spec.input), Reading()
    if not (is_code and passages.is_sources(path)):
        found = passages.from_files(path, reading)
        return found, passages.left_out_of(path, reading, of_code=False)

    found = passages.from_sources(
        path,
        chains=encoder.chains if spec.chains else None,
        on_skip=lambda file, reason: ctx.emit("warning", message=f"{file}: {reason}"),
        check_stop=ctx.check_stop,
    )
    return found, passages.left_out_of(path, reading, of_code=True)


def _is_int8(spec: EncodeSpec, ctx: Context) -> bool:
    """Whether to encode in int8: if requested and the processor has int8 kernels."""
    from ..compute.levels import levels, why_not

    if spec.dtype == "int8" and ctx.device == "cpu" and levels().int8 is None:
        ctx.emit("warning", message=f"dtype: {why_not('int8')}")
        return False
    return spec.dtype == "int8"


def _identity(spec: EncodeSpec, warm: WarmModel, encoder: TextEncoder) -> bytes:
    """Return the inputs of the embeddings or scores other than the passages."""
    files = sorted(warm.path.glob("*.safetensors")) if warm.path.is_dir() else []
    weights = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    # Journals of earlier versions are continued: they call the native dtype "model".
    dtype = "model" if spec.dtype == NATIVE else spec.dtype
    options = [*encoder.settings.values(), spec.chains, spec.max_length, dtype]
    if spec.dimensions is not None:
        options.append(spec.dimensions)
    if spec.query is not None:
        options += ["query", spec.query, spec.passage_length]
    if spec.max_length is None and encoder.modules.max_length is not None:
        options.append(f"max_seq_length {encoder.modules.max_length}")
    return orjson.dumps([str(warm.model.dtype), weights, options])


class _Work:
    """The encoding of one job, with its events and its result."""

    def __init__(
        self,
        spec: EncodeSpec,
        ctx: Context,
        encoder: TextEncoder,
        passages: Sequence[Passage],
        journal: Journal,
    ) -> None:
        self.spec = spec
        self.ctx = ctx
        self.encoder = encoder
        self.passages = passages
        self.journal = journal
        self.done = 0
        self.tokens = 0  # of this execution
        self.tokenize_s = self.prepare_s = self.encode_s = 0.0
        self._event_at = time.monotonic()

    def encode(self, left_out: str | None) -> None:
        """Encode the passages that are not in the journal."""
        from .text_encoder import batches

        if self.journal.is_stale:
            self.ctx.emit("warning", message="the input or the model has changed: begun again")
        for ignored in self.encoder.modules.ignored:
            self.ctx.emit("warning", message=f"model: {ignored}")
        done = set(self.journal.read()["row"].tolist())
        waiting = [number for number in range(len(self.passages)) if number not in done]
        self.done = len(done)
        self._begin(left_out)
        rows = self._tokenize(waiting)
        if not rows:
            return
        if cut := sum(row.is_cut for row in rows):
            self.ctx.emit(
                "warning",
                message=f"max_length: {cut} of {len(rows)} passages have more than "
                f"{self.encoder.most_tokens}; the others of their tokens are left out",
            )
        begun = time.perf_counter()
        self.encoder.prepare(rows)
        self.prepare_s = time.perf_counter() - begun
        for batch in batches([len(row.ids) for row in rows], self.spec.batch_size):
            self._check_stop()
            self._encode([waiting[i] for i in batch], [rows[i] for i in batch])
        if self.spec.output is not None:
            self.journal.sync()

    def _tokenize(self, waiting: Sequence[int]) -> list[TokenizedPassage]:
        begun = time.perf_counter()
        rows: list[TokenizedPassage] = []
        for first in range(0, len(waiting), AT_ONCE):
            self._check_stop()
            part = waiting[first : first + AT_ONCE]
            rows += self.encoder.rows([self.passages[number] for number in part])
        self.tokenize_s = time.perf_counter() - begun
        return rows

    def _encode(self, numbers: Sequence[int], rows: Sequence[TokenizedPassage]) -> None:
        begun = time.perf_counter()
        vectors = self.encoder.encode(rows)
        self.encode_s += time.perf_counter() - begun
        self._check_finite(numbers, vectors)
        lengths = [len(row.ids) for row in rows]
        cut = [row.is_cut for row in rows]
        self.ctx.patiently(
            lambda: self.journal.add(numbers, lengths, cut, vectors), self.ctx.run_dir
        )
        self.done += len(rows)
        self.tokens += sum(lengths)
        if time.monotonic() - self._event_at >= EVENT_S:
            self._event_at = time.monotonic()
            self.journal.sync()
            self.ctx.emit(
                "progress",
                done=self.done,
                total=len(self.passages),
                tokens_per_s=self.tokens / self.encode_s,
            )

    def _check_finite(self, numbers: Sequence[int], vectors: Floats) -> None:
        """Raise JobFailed for a vector with NaN or Inf, which JSON would have as null."""
        import numpy as np

        name = "embedding" if self.spec.query is None else "score"
        for number, vector in zip(numbers, vectors, strict=True):
            if not np.isfinite(vector).all():
                raise JobFailed(f"model: NaN or Inf in its {name} of {self.passages[number].id}")

    def _check_stop(self) -> None:
        if self.ctx.stop.is_set():
            self.journal.sync()
            raise Stopped(self.done)

    def _begin(self, left_out: str | None) -> None:
        import torch

        from ..compute.levels import compute_summary

        self.ctx.emit(
            "begin",
            rows=len(self.passages),
            done=self.done,
            left_out=left_out,
            model=self.spec.model,
            dtype=self.spec.dtype,
            max_length=self.encoder.max_length,
            **self.encoder.settings,
            width=self.encoder.width,
            threads=torch.get_num_threads(),
            **compute_summary(self.ctx.device),
        )

    def result(self) -> dict[str, Any]:
        """Return the result without the embeddings or scores."""
        records = self.journal.read()
        result = {
            "rows": len(records),
            "width": self.encoder.width,
            **self.encoder.settings,
            "tokens": int(records["tokens"].sum()),
            "cut": int(records["cut"].sum()),
            "model": self.spec.model,
            "timings": {
                "queued_s": self.ctx.queued_s,
                "tokenize_s": self.tokenize_s,
                "prepare_s": self.prepare_s,
                "encode_s": self.encode_s,
                "tokens_per_s": self.tokens / self.encode_s if self.encode_s else None,
            },
        }
        quality = self.encoder.quality()
        return result if quality is None else result | {"int8": quality}


def _deliver(
    spec: EncodeSpec, ctx: Context, passages: Sequence[Passage], journal: Journal
) -> dict[str, Any]:
    """Return the embeddings or scores, or write them and return the file."""
    from .journal import plain, write

    records, are_scores = journal.read(), spec.query is not None
    name = "scores" if are_scores else "embeddings"
    if spec.output is None and records["vector"].size <= MOST_NUMBERS:
        found = plain(records["vector"])
        return {
            "ids": [passage.id for passage in passages],
            name: [score for (score,) in found] if are_scores else found,
        }
    path, mode = ctx.run_dir / f"{name}.npz", 0o600
    if spec.output is not None:
        path, mode = Path(spec.output), umask.file_mode()
    ctx.patiently(
        lambda: write(path, passages, records, are_scores=are_scores, mode=mode), path.parent
    )
    return {"output": str(path)}
