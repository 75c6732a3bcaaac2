"""Tasks scored by the log-likelihood of given texts: multiple choice and perplexity.

Both follow lm-evaluation-harness 0.4: choices are compared by the sum of their tokens'
log-probabilities, and by that sum per character (`accuracy_normalized`, its acc_norm); texts longer
than the model's context are cut into windows.
Imports torch, by the engine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..context import WarmModel
from ..engine.answer import Answer
from ..engine.request import Request, Sampling
from ..errors import JobFailed
from ..models.architectures import positions_in
from ..models.vocabulary import Vocabulary
from .questions import Question

_GREEDY = Sampling(temperature=0)
_WINDOW = 2048  # positions of a model that names no limit


class MultipleChoice:
    """The choice whose text is most likely after the question."""

    def __init__(self, warm: WarmModel) -> None:
        self._warm = warm
        self._vocabulary = Vocabulary.of(warm.name, warm.model, warm.tokenizer)

    def requests(
        self, number: int, question: Question, is_canceled: Callable[[], bool]
    ) -> tuple[Question, list[Request]]:
        """Return the question, and a request to score each choice."""
        context = str(question.problem.prompt)
        return question, [
            self._request(context, f" {choice}", question.problem.row, is_canceled)
            for choice in question.choices
        ]

    def _request(
        self, context: str, continuation: str, row: int, is_canceled: Callable[[], bool]
    ) -> Request:
        ids, first = split(self._warm, context, continuation)
        self._vocabulary.check(f"dataset: row {row}", ids)
        limit = positions_in(self._warm.model.config)
        if limit is not None and len(ids) > limit + 1:  # the last token is only predicted
            raise JobFailed(
                f"dataset: row {row} has {len(ids)} tokens with a choice, and {self._warm.name} "
                f"takes {limit} before the last one"
            )
        return _scoring(ids, first, is_canceled)

    def row(self, question: Question, answers: list[Answer]) -> dict[str, Any]:
        """Return the log-likelihood of each choice, the chosen one, and the metrics."""
        sums = [math.fsum(one.logprob for one in answer.request.scores) for answer in answers]
        each = [total / len(c) for total, c in zip(sums, question.choices, strict=True)]
        chosen, chosen_normalized = sums.index(max(sums)), each.index(max(each))
        return {
            "prompt": question.problem.prompt,
            "answer": question.problem.answer,
            "chosen": question.choices[chosen],
            "choices": [
                {"text": text, "logprob": total}
                for text, total in zip(question.choices, sums, strict=True)
            ],
            "metrics": {
                "accuracy": float(chosen == question.right_choice),
                "accuracy_normalized": float(chosen_normalized == question.right_choice),
            },
        }


class Perplexity:
    """Perplexity of texts. A row has sums; `bits_per_byte` is computed over all rows."""

    def __init__(self, warm: WarmModel) -> None:
        self._warm = warm
        self._vocabulary = Vocabulary.of(warm.name, warm.model, warm.tokenizer)
        bos, eos = warm.tokenizer.bos_token_id, warm.tokenizer.eos_token_id
        prefix = bos if bos is not None else eos
        if prefix is None:
            raise JobFailed(
                f"model: the tokenizer of {warm.name} has no token that a text could begin with"
            )
        self._prefix: int = prefix

    def requests(
        self, number: int, question: Question, is_canceled: Callable[[], bool]
    ) -> tuple[Question, list[Request]]:
        """Return the question, and a request for each window of its text."""
        text = str(question.problem.prompt)
        ids = self._warm.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise JobFailed(f"dataset: row {question.problem.row} has no tokens")
        self._vocabulary.check(f"dataset: row {question.problem.row}", ids)
        size = positions_in(self._warm.model.config) or _WINDOW
        return question, [
            _scoring(window, first, is_canceled)
            for window, first in windows(ids, self._prefix, size)
        ]

    def row(self, question: Question, answers: list[Answer]) -> dict[str, Any]:
        """Return the log-likelihood of a text and its lengths."""
        text = str(question.problem.prompt)
        scores = [one.logprob for answer in answers for one in answer.request.scores]
        total = math.fsum(scores)
        size = len(text.encode())
        return {
            "prompt": text,
            "logprob": total,
            "tokens": len(scores),
            "bytes": size,
            "words": len(re.split(r"\s+", text)),  # as the harness counts them
            "metrics": {"bits_per_byte": -total / math.log(2) / size},
        }


def split(warm: WarmModel, context: str, continuation: str) -> tuple[list[int], int]:
    """Return the tokens of a context and its continuation, and the first of the continuation's.

    Blanks at the end of the context count to the continuation; the whole is tokenized, and the
    context alone to find the border. As `_encode_pair` of the harness.
    """
    stripped = context.rstrip()
    if len(stripped) < len(context):
        context, continuation = stripped, context[len(stripped) :] + continuation
    whole: list[int] = warm.tokenizer(context + continuation)["input_ids"]
    first = len(warm.tokenizer(context)["input_ids"])
    if not 0 < first < len(whole):
        raise JobFailed(f"dataset: {(context + continuation)[:60]!r} has no tokens to compare")
    return whole, first


def windows(ids: Sequence[int], prefix: int, size: int) -> Iterator[tuple[list[int], int]]:
    """Yield windows of at most `size` + 1 tokens, and the first token that each predicts.

    The model takes all but the last token of a window. The first window begins with `prefix`.
    Every token is predicted once; the last window is as long as the others, so that its tokens have
    context. As `get_rolling_token_windows` of the harness.
    """
    yield [prefix, *ids[:size]], 1
    for begin in range(size, len(ids), size):
        end = min(begin + size, len(ids))
        window = list(ids[max(end - size - 1, 0) : end])
        yield window, len(window) - (end - begin)


def _scoring(ids: Sequence[int], first: int, is_canceled: Callable[[], bool]) -> Request:
    return Request(
        ids=ids,
        sampling=_GREEDY,
        max_tokens=0,
        num_top=0,
        scored_from=first,
        is_canceled=is_canceled,
    )
