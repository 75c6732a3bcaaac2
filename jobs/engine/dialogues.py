"""Completions in several turns: each keeps its KV cache, and goes on with tokens that it is given.

Every token is computed once, however many turns follow. A turn begins where its observation ends,
without waiting for those of the others. Imports torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .detokenizer import TextStream
from .kv_cache import PrefixCache
from .low_rank import Adapter
from .request import Sampling
from .rollouts import Drawing, Rollout, RolloutRequest, RolloutScheduler, Segment
from .sequence import Sequence, now

_BEFORE = 256  # tokens: what a chat template may have written of a turn


@dataclass(frozen=True)
class Turn:
    """What the model wrote in a turn.

    `text`: without the token or text that ended it. `reason`: "stop" if it ended by itself,
    "length" if it was cut. `before`: the latest tokens before it.
    """

    segment: Segment
    text: str
    reason: str
    before: list[int]


@dataclass(eq=False)
class _Held:
    """A dialogue between two turns, or before the first one."""

    ids: list[int]  # all tokens so far
    kv: Any  # of all of them but the last one that was drawn
    capacity: int


@dataclass(kw_only=True, eq=False)
class _TurnRequest(RolloutRequest):
    """A turn: its `ids` are all tokens before it."""

    key: Hashable
    held: _Held


class _Turn(Rollout):
    """A turn that is being written."""

    def __init__(self, request: _TurnRequest, index: int, kv: Any, tokenizer: Any) -> None:
        super().__init__(request, index, kv)
        self.key = request.key
        self.held = request.held
        self.is_first = kv.length == 0
        self.before = list(request.ids[-_BEFORE:])
        self.text = ""
        self._stream = TextStream(tokenizer, request.ids, request.stop)

    def accept(self, token: int, ends: frozenset[int], logprob: Any = None) -> None:
        super().accept(token, ends, logprob)
        if token not in ends:
            self.text += self._stream.add(token)
            if self._stream.is_stopped:
                self.finish_reason = "stop"
        if self.finish_reason is not None:
            self.text += self._stream.finish()


class Dialogues(RolloutScheduler):
    """The dialogues of a training step, with the weights of this step.

    `begin` a dialogue with its prompt, and `go_on` for each turn; `step` returns the turns that are
    over. `tokenizer`: for the texts. `stop`: texts that end a turn, besides the tokens that do.
    `most_sequences`: that are computed at a time.
    """

    def __init__(
        self,
        runner: Any,
        how: Drawing,
        tokenizer: Any,
        *,
        most_sequences: int,
        stop: tuple[str, ...] = (),
        adapter: Adapter | None = None,
    ) -> None:
        super().__init__(runner, how, most_sequences, prefix_cache=PrefixCache())
        self._tokenizer = tokenizer
        self._stop = stop
        self._adapter = adapter
        self._held: dict[Hashable, _Held] = {}
        self._over: list[_Turn] = []

    def begin(self, key: Hashable, prompt: Items[int], *, capacity: int) -> None:
        """Begin a dialogue; `capacity`: tokens that it has at most, with the prompt."""
        self._held[key] = _Held(list(prompt), self._runner.new(capacity), capacity)

    def go_on(
        self,
        key: Hashable,
        numbers: NDArray[np.float64],
        given: Items[int] = (),
        *,
        stop: Items[str] = (),
    ) -> int:
        """Let the model write a turn after `given` tokens; return how many tokens it may have.

        `numbers`: in [0, 1), one for each token of the turn. `stop`: further texts that end it. 0:
        there is no room left, and nothing is written.
        """
        held = self._held[key]
        room = min(len(numbers), held.capacity - len(held.ids) - len(given))
        if room <= 0:
            return 0
        held.ids += given
        request = _TurnRequest(
            ids=held.ids,
            sampling=Sampling(),
            max_tokens=room,
            stop=(*self._stop, *stop),
            adapter=self._adapter,
            is_canceled=lambda: self._held.get(key) is not held,
            numbers=numbers[None, :room],
            key=key,
            held=held,
        )
        self._longest = max(self._longest, len(held.ids))
        self._shares.add(request, now())
        return room

    def step(self) -> dict[Hashable, Turn]:
        """Compute a token of each turn; return those that are over. Raises NotFiniteError."""
        self.compute()
        over, self._over = self._over, []
        return {
            one.key: Turn(one.segment, one.text, str(one.finish_reason), one.before) for one in over
        }

    @property
    def is_idle(self) -> bool:
        """Whether no turn is being written."""
        self._shares.drop_idle()
        return not self._shares

    def given(self, ids: Items[int]) -> Segment:
        """Return tokens that the model is given, as a segment."""
        return Segment(ids=list(ids), is_given=True)

    def end(self, key: Hashable) -> None:
        """Forget a dialogue; a turn of it that is being written is given up."""
        del self._held[key]

    def _capacity(self, request: Any) -> int:
        return int(request.held.capacity)

    def _kv(self, request: Any) -> Any:
        return request.held.kv

    def _sequence(self, request: Any, index: int, kv: Any) -> _Turn:
        return _Turn(request, index, kv, self._tokenizer)

    def _cache_prefix(self, sequence: Sequence) -> None:
        """Cache prompts only: the tokens of a turn are computed one by one, with other bits."""
        if self._is_first(sequence):
            super()._cache_prefix(sequence)

    def _reuse_prefix(self, sequence: Sequence) -> None:
        if self._is_first(sequence):
            super()._reuse_prefix(sequence)

    def _is_first(self, sequence: Sequence) -> bool:
        """Whether a turn is the first one after the prompt."""
        return isinstance(sequence, _Turn) and sequence.is_first

    def _finish(self, sequence: Any) -> None:
        super()._finish(sequence)
        sequence.held.ids += sequence.segment.ids
        if not sequence.request.is_canceled():
            self._over.append(sequence)
