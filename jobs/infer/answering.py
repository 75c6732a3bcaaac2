"""The work of an infer job: tokenize, submit to the engine of the model, emit text and progress."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..compute.levels import compute_summary
from ..compute.threads import without_helpers
from ..context import Context, WarmModel
from ..engine.grammar import Grammar
from ..engine.request import End, Piece, Request, Sampling
from ..engine.scheduler import Engine, engine_of
from ..errors import JobFailed, Stopped
from . import batch_file, gui_actions
from .options import InferSpec
from .tokenization import Prompt, encode, room

_EVENT_S = 0.05  # between two events with text
_ROWS_AT_ONCE = 32


@dataclass
class Answer:
    """The completions of one prompt as they grow."""

    request: Request
    tokenise_s: float
    spec: InferSpec
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = self.request.num_completions
        self.texts, self.tokens, self.reasons = [""] * count, [0] * count, [None] * count

    def add(self, piece: Piece) -> None:
        self.texts[piece.index] += piece.text
        self.tokens[piece.index] += piece.tokens
        self.reasons[piece.index] = piece.finish_reason

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [
            {"index": index, "text": text, "finish_reason": reason, **self._read(text)}
            for index, (text, reason) in enumerate(zip(self.texts, self.reasons, strict=True))
        ]

    def _read(self, text: str) -> dict[str, Any]:
        """Return the actions in the text, if requested."""
        if self.spec.actions == "none":
            return {}
        seen = self.request.images
        screen = seen[-1].size if seen else None
        if self.spec.screen:
            screen = gui_actions.parse_screen(self.spec.screen)
        return {"actions": gui_actions.read(text, screen)}

    @property
    def usage(self) -> dict[str, int]:
        prompt, completion = len(self.request.ids), sum(self.tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "cached_tokens": self.request.stats.cached_tokens,
        }

    @property
    def timings(self) -> dict[str, float]:
        stats = self.request.stats
        # The first token of each choice is part of the prefill.
        written = sum(self.tokens) - self.request.num_completions
        speed = written / stats.decode_s if stats.decode_s else 0.0
        return {
            "queued_s": round(stats.queued_s, 6),
            "tokenise_s": round(self.tokenise_s, 6),
            "vision_s": round(stats.vision_s, 6),
            "prefill_s": round(stats.prefill_s, 6),
            "decode_s": round(stats.decode_s, 6),
            "tokens_per_s": round(speed, 3),
        }


def answer_one(spec: InferSpec, ctx: Context, warm: WarmModel, prompt: Prompt) -> dict[str, Any]:
    """Answer one prompt and stream its text as events. Raises Stopped and JobFailed."""
    seed = _seed(spec)
    engine = _engine(spec, warm)
    with _cancel_on_exit(ctx) as is_canceled:
        answer = _prepare(spec, warm, prompt, seed, _grammar(spec, engine), is_canceled)
        images = [image.num_tokens for image in answer.request.images]
        about: dict[str, Any] = {"image_tokens": images} if images else {}
        about |= compute_summary(ctx.device)
        ctx.emit("begin", prompt_tokens=len(answer.request.ids), **about)
        engine.submit(answer.request)
        _emit_text(ctx, answer)
        _check_complete(answer)
    return {
        "choices": answer.choices,
        "usage": answer.usage,
        "timings": answer.timings,
        "seed": seed,
        "model": spec.model,
        "precision": engine.precision,
    }


@contextmanager
def _cancel_on_exit(ctx: Context) -> Iterator[Callable[[], bool]]:
    """Yield whether generations are canceled: by `ctx.stop`, and with the end of this block.

    So an error in the block also frees the slots of the engine.
    """
    has_ended = threading.Event()
    try:
        yield lambda: has_ended.is_set() or ctx.stop.is_set()
    finally:
        has_ended.set()


def _engine(spec: InferSpec, warm: WarmModel) -> Engine:
    return engine_of(warm, spec.precision or warm.precision)


def _seed(spec: InferSpec) -> int:
    return secrets.randbits(63) if spec.seed is None else spec.seed


def _grammar(spec: InferSpec, engine: Engine) -> Grammar | None:
    return engine.grammar(spec.json_schema) if spec.json_schema else None


@without_helpers()
def _prepare(
    spec: InferSpec,
    warm: WarmModel,
    prompt: Prompt,
    seed: int,
    grammar: Grammar | None,
    is_canceled: Callable[[], bool],
) -> Answer:
    begun = time.perf_counter()
    ids, seen = encode(spec, warm, prompt)
    request = Request(
        ids=ids,
        images=seen,
        sampling=Sampling(
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            frequency_penalty=spec.frequency_penalty,
            presence_penalty=spec.presence_penalty,
            seed=seed,
        ),
        num_completions=spec.n,
        max_tokens=room(spec, warm, len(ids)),
        stop=spec.stop,
        adapter=warm.adapter,
        grammar=grammar,
        is_canceled=is_canceled,
    )
    return Answer(request, time.perf_counter() - begun, spec)


def _emit_text(ctx: Context, answer: Answer) -> None:
    """Stream the text, in at most 20 events per second. Raises the error of the engine."""
    pending: dict[int, tuple[str, int]] = {}
    due = time.perf_counter()
    pieces = answer.request.pieces
    while True:
        wait_s = None if not pending else max(0.0, due - time.perf_counter())
        try:
            piece = pieces.get(timeout=wait_s)
        except queue.Empty:
            piece = None
        if isinstance(piece, Piece):
            answer.add(piece)
            text, tokens = pending.get(piece.index, ("", 0))
            pending[piece.index] = (text + piece.text, tokens + piece.tokens)
        is_end = isinstance(piece, End)
        if pending and (is_end or time.perf_counter() >= due):
            for index, (text, tokens) in sorted(pending.items()):
                if text or tokens:
                    ctx.emit("text", index=index, text=text, tokens=tokens)
            pending.clear()
            due = time.perf_counter() + _EVENT_S
        if isinstance(piece, End):
            if piece.error is not None:
                raise piece.error
            return


# Files of prompts.


def answer_file(spec: InferSpec, ctx: Context, warm: WarmModel) -> dict[str, Any]:
    """Answer every record of the input that has no answer yet. Raises Stopped and JobFailed.

    A record that cannot be answered gets an error object in its line.
    """
    seed = spec.seed if spec.seed is not None else _stored_seed(ctx)
    source = Path(spec.input)
    total = sum(1 for _ in batch_file.read(source))
    engine = _engine(spec, warm)
    usage: dict[str, int] = {}
    begun = time.perf_counter()
    with (
        batch_file.Answers(Path(spec.output), ctx.job_id) as answers,
        _cancel_on_exit(ctx) as is_canceled,
    ):
        ctx.emit("begin", rows=total, done=answers.done, **compute_summary(ctx.device))
        ctx.emit("progress", done=answers.done, total=total)
        emitted_at = time.perf_counter()
        found = _in_order(spec, warm, engine, source, answers.done, seed, is_canceled)
        for answer in found:
            if isinstance(answer, JobFailed):
                answers.append_error(str(answer))
            else:
                answers.append({"choices": answer.choices, "usage": answer.usage})
                for name, value in answer.usage.items():
                    usage[name] = usage.get(name, 0) + value
            if answers.done == total or time.perf_counter() - emitted_at >= 1:
                emitted_at = time.perf_counter()
                ctx.emit("progress", done=answers.done, total=total)
    seconds = time.perf_counter() - begun
    tokens = usage.get("completion_tokens", 0)
    return {
        "rows": total,
        "failed": answers.failed,  # records with an error instead of an answer
        "output": spec.output,
        "usage": usage,  # of the records answered by this execution
        "timings": {"total_s": round(seconds, 6), "tokens_per_s": round(tokens / seconds, 3)},
        "seed": seed,
        "model": spec.model,
    }


def _stored_seed(ctx: Context) -> int:
    """Return a random seed, stored for later executions of the job."""
    path = ctx.run_dir / "seed"
    if not path.exists():
        path.write_text(str(secrets.randbits(63)))
    return int(path.read_text())


def _in_order(
    spec: InferSpec,
    warm: WarmModel,
    engine: Engine,
    source: Path,
    done: int,
    seed: int,
    is_canceled: Callable[[], bool],
) -> Iterator[Answer | JobFailed]:
    """Yield the answers to the records after the first `done`, with many in flight.

    A record that cannot be answered gives a JobFailed instead.
    """
    in_flight: deque[Answer | JobFailed] = deque()
    grammar = _grammar(spec, engine)
    for number, prompt in enumerate(batch_file.read(source)):
        if number < done:
            continue
        row_seed = (seed + number) % 2**63
        try:
            answer = _prepare(spec, warm, prompt, row_seed, grammar, is_canceled)
            engine.submit(answer.request)
            in_flight.append(answer)
        except JobFailed as error:
            in_flight.append(error)
        if len(in_flight) >= _ROWS_AT_ONCE:
            yield _wait_for(in_flight.popleft())
    while in_flight:
        yield _wait_for(in_flight.popleft())


def _wait_for(answer: Answer | JobFailed) -> Answer | JobFailed:
    """Wait for an answer. Raises Stopped, and errors of the engine."""
    if isinstance(answer, JobFailed):
        return answer
    while not isinstance(piece := answer.request.pieces.get(), End):
        answer.add(piece)
    if isinstance(piece.error, JobFailed):
        return piece.error
    if piece.error is not None:
        raise piece.error
    _check_complete(answer)
    return answer


def _check_complete(answer: Answer) -> None:
    """Raise Stopped when a choice was canceled by `ctx.stop`."""
    if any(reason in (None, "cancelled") for reason in answer.reasons):
        raise Stopped(0)
