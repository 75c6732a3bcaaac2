"""The engine's answers to the questions of an evaluation: concurrent, returned in order.

A question is one request or several. Imports torch, by the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TypeVar

from ..engine.answer import Answer
from ..engine.engine import Engine
from ..engine.request import Request
from ..engine.scheduler import MAX_SEQUENCES

Subject = TypeVar("Subject")


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
        answer.wait()
    return subject
