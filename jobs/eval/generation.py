"""Tasks whose completions are scored: rewards and GSM8K. Imports torch, by the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from ..context import WarmModel
from ..engine.answer import Answer
from ..engine.request import Request, Sampling
from ..errors import JobFailed
from ..intervals import majority, pass_at_k
from ..models.architectures import positions_in
from ..models.vocabulary import Vocabulary
from ..rewards.prompts import Prompt, encode
from ..rewards.scoring import Score
from . import gsm8k
from .options import EvalSpec
from .questions import Question

_MAX_TOKENS = gsm8k.MAX_TOKENS
_RIGHT = 1.0  # the least reward of a right completion


class Generation:
    """Completions of the model, each with scores by metric. The first metric is the primary one."""

    def __init__(self, spec: EvalSpec, warm: WarmModel, score: Score) -> None:
        """score: by the rewards of the spec."""
        self._spec = spec
        self._warm = warm
        self._vocabulary = Vocabulary.of(warm.name, warm.model, warm.tokenizer)
        self._score_rewards = score
        self._weights = {one.name: one.weight for one in spec.reward_specs}
        self._score = self._rewards if spec.variant is None else self._gsm8k

    def requests(
        self, number: int, question: Question, is_canceled: Callable[[], bool]
    ) -> tuple[Prompt, list[Request]]:
        """Return the prompt of question `number`, and the request for its completions.

        Raises JobFailed if the model has no room for them.
        """
        spec = self._spec
        (prompt,) = encode(
            [question.problem],
            self._warm.tokenizer,
            self._vocabulary,
            chat_template=spec.chat_template,
            system=spec.system,
        )
        sampling = Sampling(
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            seed=(spec.seed + number) % 2**63,
        )
        request = Request(
            ids=prompt.ids,
            sampling=sampling,
            num_completions=spec.repeats,
            max_tokens=self._room(prompt),
            stop=spec.stops,
            is_canceled=is_canceled,
        )
        return prompt, [request]

    def _room(self, prompt: Prompt) -> int:
        wanted = self._spec.max_tokens or _MAX_TOKENS
        limit = positions_in(self._warm.model.config)
        if limit is None:
            return wanted
        left = limit - len(prompt.ids)
        if left < (self._spec.max_tokens or 1):
            raise JobFailed(
                f"max_tokens: the prompt of row {prompt.row} has {len(prompt.ids)} tokens and "
                f"{self._warm.name} takes {limit} together with the completion: at most "
                f"{max(left, 0)} are left, got {wanted}"
            )
        return min(wanted, left)

    def row(self, prompt: Prompt, answers: list[Answer]) -> dict[str, Any]:
        """Return the record of a question: its completions with their scores, and its metrics."""
        (answer,) = answers
        completions = [
            {"text": text, "finish_reason": reason, "tokens": tokens, **scored}
            for text, reason, tokens, scored in zip(
                answer.texts,
                answer.reasons,
                answer.tokens,
                self._score(prompt, answer.texts),
                strict=True,
            )
        ]
        return {
            "prompt": prompt.text,
            "answer": prompt.answer,
            "completions": completions,
            "metrics": self._metrics(prompt, completions),
        }

    def _gsm8k(self, prompt: Prompt, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
        assert self._spec.variant is not None
        assert prompt.answer is not None
        for text in texts:
            found = {name: one.extract(text) for name, one in self._spec.variant.filters.items()}
            scores = {n: float(gsm8k.is_correct(a, prompt.answer)) for n, a in found.items()}
            yield {"extracted": found, "scores": scores}

    def _rewards(self, prompt: Prompt, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
        by_name = self._score_rewards(prompt, texts)
        for index in range(len(texts)):
            scores = {name: found[index] for name, found in by_name.items()}
            known = [self._weights[n] * s for n, s in scores.items() if s is not None]
            total = math.fsum(known) if known else None  # None: unscored, as in GRPO
            yield {"scores": {"reward": total, **(scores if len(scores) > 1 else {})}}

    def _metrics(self, prompt: Prompt, completions: list[dict[str, Any]]) -> dict[str, float]:
        """Return the mean of each score, then pass@k and maj@k.

        Completions without a score are left out, and so is a metric that too few have.
        """
        values = known_scores(completions)
        found = {name: fmean(known) for name, known in values.items() if known}
        primary, *others = values
        judged = [primary, *others] if self._spec.variant is not None else [primary]
        for name in judged:
            prefix = "" if len(judged) == 1 else f"{name}_"
            found |= passes(values[name], self._spec.pass_k, prefix)
            for k in self._spec.maj_k:
                vote = majority([one["extracted"][name] for one in completions], k)
                found[f"{prefix}maj@{k}"] = float(gsm8k.is_correct(vote, prompt.answer or ""))
        return found


def known_scores(completions: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return each score of the completions that have it, in the order of the first to have it."""
    found: dict[str, list[float]] = {}
    for one in completions:
        for name, score in one["scores"].items():
            known = found.setdefault(name, [])
            if score is not None:
                known.append(score)
    return found


def passes(scores: Sequence[float], ks: Sequence[int], prefix: str = "") -> dict[str, float]:
    """Return pass@k of the scores of a question, for each k that there are enough of."""
    right = sum(score >= _RIGHT for score in scores)
    return {f"{prefix}pass@{k}": pass_at_k(len(scores), right, k) for k in ks if k <= len(scores)}
