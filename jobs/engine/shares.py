"""What each job has in an engine, and how the jobs divide its steps: fair by tokens.

In every step the places of the batch, and the room for prompt tokens, are divided evenly among the
jobs that can use them (max-min fairness). What cannot be divided goes to the job that has had the
fewest tokens so far: Virtual Token Counter (Sheng et al., OSDI 2024).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .request import Request
from .sequence import Sequence as Running


@dataclass(eq=False)
class Prefilled:
    """A prompt whose further completions begin when there is room for them."""

    first: Running  # the completion with index 0, whose image positions the others share
    kv: Any  # of the prompt; the last completion takes it, the others take copies
    logits: torch.Tensor  # (V,) of the last prompt token
    done_at: float  # end of prefill
    num_begun: int = 0  # completions

    @property
    def request(self) -> Request:
        return self.first.request

    @property
    def num_left(self) -> int:
        """The number of completions that have not begun."""
        return self.request.num_completions - self.num_begun


@dataclass(eq=False)
class Share:
    """The requests of one job, by their progress, each in the order of submission."""

    num_tokens: int = 0  # computed for this job; a new one begins just below all others
    places: int = 0  # of sequences in the batch of this step
    waiting: deque[tuple[Request, float]] = field(default_factory=deque)  # with submission times
    prefilling: deque[Running] = field(default_factory=deque)
    prefilled: deque[Prefilled] = field(default_factory=deque)
    decoding: list[Running] = field(default_factory=list)

    @property
    def holders(self) -> list[Running | Prefilled]:
        """The sequences and prompts that hold a KV cache."""
        return [*self.decoding, *self.prefilling, *self.prefilled]

    @property
    def is_running(self) -> bool:
        """Whether it holds a KV cache."""
        return bool(self.decoding or self.prefilling or self.prefilled)

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.is_running)

    def wanted_places(self, most: int) -> int:
        """Return how many sequences could run at a time, at most `most`."""
        count = len(self.decoding) + sum(one.num_left for one in self.prefilled)
        count += sum(one.request.num_completions for one in self.prefilling)
        for request, _ in self.waiting:
            if count >= most:
                break
            count += request.num_completions
        return min(count, most)

    def has(self, request: Request) -> bool:
        """Whether a sequence of a request runs, or is still to begin."""
        return any(one.request is request for one in self.holders)

    def requests(self) -> list[Request]:
        """Return all requests, each once."""
        once = {id(one.request): one.request for one in self.holders}
        return [*once.values(), *(request for request, _ in self.waiting)]

    def remove(self, request: Request) -> None:
        """Remove the sequences of a request that has failed."""
        self.decoding = [one for one in self.decoding if one.request is not request]
        self.prefilling = deque(one for one in self.prefilling if one.request is not request)
        self.prefilled = deque(one for one in self.prefilled if one.request is not request)


class Shares:
    """The jobs that have requests, in the order in which they came."""

    def __init__(self) -> None:
        self._by_owner: dict[Hashable, Share] = {}

    def __iter__(self) -> Iterator[Share]:
        return iter(self._by_owner.values())

    def __bool__(self) -> bool:
        return bool(self._by_owner)

    def add(self, request: Request, since: float) -> None:
        """Append a request that was submitted at `since`."""
        share = self._by_owner.get(request.owner)
        if share is None:
            fewest = min((one.num_tokens for one in self), default=1)
            share = self._by_owner[request.owner] = Share(fewest - 1)
        share.waiting.append((request, since))

    def of(self, request: Request) -> Share:
        """Return the share that a request belongs to."""
        return self._by_owner[request.owner]

    def drop_idle(self) -> None:
        """Forget the jobs that have no request left."""
        for owner in [owner for owner, share in self._by_owner.items() if share.is_idle]:
            del self._by_owner[owner]

    def after(self, share: Share) -> list[Share]:
        """Return the jobs that came after another one."""
        shares = list(self)
        return shares[shares.index(share) + 1 :]

    def in_turn(self) -> list[Share]:
        """Return the jobs, those that have had the fewest tokens first."""
        return sorted(self, key=lambda share: share.num_tokens)


def divided(total: int, wanted: Sequence[int]) -> list[int]:
    """Divide `total` evenly: none gets more than wanted, and the first ones get the remainder."""
    given = [0] * len(wanted)
    left = total
    while left > 0 and (open_ := [n for n, most in enumerate(wanted) if given[n] < most]):
        each, rest = divmod(left, len(open_))
        for place, number in enumerate(open_):
            more = min(each + (place < rest), wanted[number] - given[number])
            given[number] += more
            left -= more
    return given
