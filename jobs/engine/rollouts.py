"""Completions for a training, sampled by the scheduler in steps of the job itself.

A token is decided by a number of its completion and position, so that a completion depends neither
on the others nor on the order in which they end. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .kv_cache import PrefixCache
from .low_rank import Adapter
from .padded import left_padded
from .prefill_budget import WholePrompts
from .request import Request, Sampling
from .sampling import BatchSampler, entropy, logp
from .scheduler import Scheduler
from .sequence import Sequence, now

# (ids (B, T) padded on the left, logits (B, V)) to logits, as those of transformers.
Processor = Callable[[Tensor, Tensor], Tensor]

UNLIMITED = 2**62  # bytes: memory must not decide which completions share a pass


@dataclass
class Segment:
    """Tokens that the model wrote, or that it was given (`is_given`) and that are not learned.

    In nats, of the sampler: the entropies of the distribution at each token, and the
    log-probabilities of the tokens, if requested; none of those that were given. `prompt`: the
    tokens before it, where it begins a new context; None: it follows the segment before.
    """

    ids: list[int] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    is_given: bool = False
    prompt: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How tokens are drawn.

    Entropies and log-probabilities are at `temperature`, over the whole vocabulary, before top-k
    and top-p. `processors` change the logits before the sampler; `pad_id` is for their ids.
    """

    sampler: BatchSampler
    temperature: float
    max_new_tokens: int
    ends: frozenset[int]
    processors: Items[Processor] = ()
    pad_id: int = 0
    wants_logps: bool = False


@torch.no_grad()
def generate(
    runner: Any,
    prompts: Items[Items[int]],
    uniform: NDArray[np.float64],
    how: Drawing,
    *,
    adapter: Adapter | None = None,
) -> list[Segment]:
    """Return one completion per prompt; equal prompts that follow each other are read once.

    `runner`: Decoder, FallbackRunner or PaddedRunner. `uniform`: (B, max_new_tokens) in [0, 1), the
    number that decides each token. `adapter`: of all tokens. Raises NotFiniteError.
    """
    scheduler = RolloutScheduler(runner, how, len(prompts))
    requests, place = [], 0
    runs = [(ids, len(list(run))) for ids, run in groupby(map(tuple, prompts))]
    for ids, count in runs if runner.forks else [(tuple(ids), 1) for ids in prompts]:
        requests.append(
            RolloutRequest(
                ids=ids,
                sampling=Sampling(),
                num_completions=count,
                max_tokens=how.max_new_tokens,
                adapter=adapter,
                numbers=uniform[place : place + count],
            )
        )
        place += count
    scheduler.run(requests)
    return [one for request in requests for one in request.written]


@dataclass(kw_only=True, eq=False)
class RolloutRequest(Request):
    """A prompt; the numbers of its completions, (num_completions, max_tokens); those written."""

    numbers: NDArray[np.float64]
    written: list[Segment] = field(default_factory=list)


class Rollout(Sequence):
    """A completion of a RolloutRequest."""

    def __init__(self, request: RolloutRequest, index: int, kv: Any) -> None:
        super().__init__(request, index, kv)
        self.segment = Segment()
        self._numbers = request.numbers[index]
        request.written.append(self.segment)

    @property
    def number(self) -> float:
        """The number that decides the next token."""
        return float(self._numbers[len(self.segment.ids)])

    def accept(self, token: int, ends: frozenset[int], logprob: Any = None) -> None:
        self.segment.ids.append(token)
        self.next_token = token
        if token in ends:
            self.finish_reason = "stop"
        elif len(self.segment.ids) == self.request.max_tokens:
            self.finish_reason = "length"


class RolloutScheduler(Scheduler):
    """Samples all completions at once: none waits for memory, and an error ends all."""

    def __init__(
        self, runner: Any, how: Drawing, count: int, *, prefix_cache: PrefixCache | None = None
    ) -> None:
        super().__init__(
            budget_bytes=UNLIMITED,
            prefill=WholePrompts(),
            ends=how.ends,
            most_sequences=count,
            prefix_cache=prefix_cache,
        )
        self._runner = runner
        self._how = how
        self._longest = 0  # tokens of a prompt
        self._begun: list[tuple[Rollout, Tensor]] = []  # with the logits (V,) of their prompts

    def run(self, requests: Items[RolloutRequest]) -> None:
        """Sample the completions of requests. Raises NotFiniteError."""
        self._longest = max(len(request.ids) for request in requests)
        for request in requests:
            self._shares.add(request, now())
        while self._shares:
            self.compute()

    def compute(self) -> None:
        """Compute a token of each completion. Raises NotFiniteError."""
        self._compute_step()
        begun, self._begun = self._begun, []
        if begun:
            sequences, rows = zip(*begun, strict=True)
            self._append_tokens(list(sequences), torch.stack(rows))
        self._shares.drop_idle()

    def _sequence(self, request: Request, index: int, kv: Any) -> Rollout:
        assert isinstance(request, RolloutRequest)
        return Rollout(request, index, kv)

    @contextmanager
    def _isolating_errors(self, request: Request) -> Iterator[None]:
        yield

    def _append_token(self, sequence: Any, logits: Tensor) -> None:
        self._begun.append((sequence, logits))  # drawn with those of the other prompts

    def _append_tokens(self, sequences: list[Any], logits: Tensor) -> None:
        if not sequences:
            return
        how, logits = self._how, logits.float()
        uniform = torch.tensor([one.number for one in sequences], dtype=torch.float64)
        uniform, scored = uniform.to(logits.device), logits
        if how.processors:
            rows = [(*one.request.ids, *one.segment.ids) for one in sequences]
            length = self._longest + max(len(one.segment.ids) for one in sequences)
            history = left_padded(rows, length, how.pad_id, logits.device)
            nats = entropy(logits, how.temperature)
            for process in how.processors:
                logits = process(history, logits)
            tokens, _ = how.sampler.draw(logits, uniform)
        else:
            tokens, nats = how.sampler.draw(logits, uniform)
        logps = logp(scored, how.temperature, tokens).tolist() if how.wants_logps else None
        drawn = zip(sequences, tokens.tolist(), nats.tolist(), strict=True)
        for place, (sequence, token, entropy_) in enumerate(drawn):
            sequence.segment.entropies.append(entropy_)
            if logps is not None:
                sequence.segment.logps.append(logps[place])
            self._accept_token(sequence, token, scored[place])
