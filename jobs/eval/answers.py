"""The engine's answers to the questions of an evaluation: concurrent, returned in order.

A question is one request or several. Imports torch, by the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from ..engine.request import End, Piece, Request
from ..engine.scheduler import MAX_SEQUENCES, Engine
from ..errors import JobFailed, Stopped

Subject = TypeVar("Subject")


@dataclass
class Answer:
    """The completions of one request."""

    request: Request
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


def answered(
    engine: Engine, work: Iterator[tuple[Subject, list[Request]]]
) -> Iterator[tuple[Subject, list[Answer]]]:
    """Yield each subject with the answers to its requests, in order, with many in flight.

    Raises Stopped when a request was canceled, JobFailed, and errors of the engine.
    """
    in_flight: deque[tuple[Subject, list[Answer]]] = deque()
    sequences = 0
    owner = object()  # this evaluation: it shares the engine with other jobs
    for subject, requests in work:
        for request in requests:
            request.owner = owner
            engine.submit(request)
        answers = [Answer(request) for request in requests]
        in_flight.append((subject, answers))
        sequences += _sequences(answers)
        while sequences >= MAX_SEQUENCES:
            done = in_flight.popleft()
            sequences -= _sequences(done[1])
            yield _complete(done)
    while in_flight:
        yield _complete(in_flight.popleft())


def _sequences(answers: list[Answer]) -> int:
    return sum(answer.request.num_completions for answer in answers)


def _complete(subject: tuple[Subject, list[Answer]]) -> tuple[Subject, list[Answer]]:
    """Wait for the answers."""
    for answer in subject[1]:
        while not isinstance(piece := answer.request.pieces.get(), End):
            answer.add(piece)
        if isinstance(piece.error, JobFailed):
            raise piece.error
        if piece.error is not None:
            raise piece.error
        if any(reason in (None, "cancelled") for reason in answer.reasons):
            raise Stopped(0)
    return subject
