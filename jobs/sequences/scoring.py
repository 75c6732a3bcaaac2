"""Scores of sequences by a model's forward passes: over packs, or padded batches.

Packs share first tokens and need no padding; padded batches are for models that cannot be packed
exactly. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from ..context import ONE_PROCESS, Context, Ranks
from .attention import can_pack, packed_attention
from .logprobs import Scores
from .packs import Pack, split
from .padded import Padded, score_padded
from .passes import Embedded, exchange, pack_tokens, require_one_process, score_pack
from .sequence import Sequence

Part: TypeAlias = "Pack | Padded"
Place: TypeAlias = "tuple[Tensor, Tensor]"  # rows and columns of a table


class Table(NamedTuple):
    """Scores of the tokens of a batch, (rows, columns) each; 0 where none was scored.

    Log-probabilities and entropies in nats, float32; `is_top`, bool: whether the token has the
    highest probability, None if it is not needed.
    """

    logps: Tensor
    entropies: Tensor
    is_top: Tensor | None = None

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: Any, *, wants_top: bool = False) -> Self:
        zeros = torch.zeros(shape, device=device)
        return cls(zeros, zeros.clone(), zeros.bool() if wants_top else None)

    def copy(self) -> Self:
        is_top = None if self.is_top is None else self.is_top.clone()
        return self._replace(
            logps=self.logps.clone(), entropies=self.entropies.clone(), is_top=is_top
        )

    def put(self, at: Place, scores: Scores) -> Self:
        """Return the table with the scores of some tokens, with their gradients."""
        return self._replace(
            logps=self.logps.index_put(at, scores.logps),
            entropies=self.entropies.index_put(at, scores.entropies),
        )

    def store(self, at: Place, scores: Scores) -> None:
        """Set the scores of some tokens, without gradients."""
        self.logps[at] = scores.logps.detach()
        self.entropies[at] = scores.entropies.detach()
        if self.is_top is not None:
            self.is_top[at] = scores.is_top

    def exchange(self, places: list[Place], ranks: Ranks) -> None:
        """Set the scores of the other ranks' tokens; `places`: of this rank's."""
        exchange(places, [one for one in self if one is not None], ranks)


@dataclass(frozen=True)
class Scored:
    """A part, and the scores of its tokens.

    `balance`: the weighted loss that balances a mixture of experts, None without one.
    """

    part: Part
    scores: Scores
    balance: Tensor | None = None

    @property
    def at(self) -> Place:
        """The places of the tokens in a table."""
        return self.part.rows, self.part.columns


@dataclass(kw_only=True)
class Scorer:
    """Scores sequences by a model.

    `most_tokens`: of a pack; None: padded batches, each of `rows` rows of the batch (None: of all).
    `is_half`: bfloat16 matrix multiplications. `router_coefficient`: the weight of the loss that
    balances a mixture of experts, of padded batches; 0: none. `wants_top`: see Scores.
    """

    most_tokens: int | None
    pad_id: int
    rows: int | None = None
    temperature: float = 1.0
    is_half: bool = False
    router_coefficient: float = 0.0
    wants_top: bool = False

    @classmethod
    def of(cls, model: Any, ctx: Context, *, samples: bool = False, **how: Any) -> Self:
        """Return the scorer of a job; `samples`: see `tokens_that_fit`.

        Raises JobFailed for several processes without packs.
        """
        if can_pack(model):
            return cls(most_tokens=pack_tokens(model, ctx, samples=samples), **how)
        require_one_process(ctx.ranks, model)
        return cls(most_tokens=None, **how)

    def parts(
        self, groups: Iterable[tuple[Sequence, ...]], device: Any, ranks: Ranks = ONE_PROCESS
    ) -> list[Part]:
        """Divide sequences into the passes of this rank; groups stay together in packs."""
        if self.most_tokens is not None:
            return [Pack(one, device) for one in split(groups, self.most_tokens, ranks)]
        batches: dict[int, list[Sequence]] = {}
        for one in sorted(chain(*groups), key=lambda one: one.row):
            batches.setdefault(one.row // self.rows if self.rows else 0, []).append(one)
        return [Padded(rows, self.pad_id, device) for rows in batches.values()]

    def scored(
        self,
        model: Any,
        parts: Iterable[Part],
        *,
        has_entropy_gradient: bool = False,
        balances: bool = True,
    ) -> Iterator[Scored]:
        """Yield the scores of each part, with gradients where they are enabled.

        The backward pass of a part comes before the next part is taken. `balances`: whether the
        loss that balances a mixture of experts is computed.
        """
        learns, balances = torch.is_grad_enabled(), balances and self.router_coefficient != 0
        how: dict[str, Any] = {
            "is_half": self.is_half,
            "has_entropy_gradient": has_entropy_gradient,
        }
        with nullcontext() if self.most_tokens is None else packed_attention(model):
            for part in parts:
                if isinstance(part, Padded):
                    scores, balance = score_padded(
                        model, part, self.temperature, balances=balances, **how
                    )
                    yield Scored(
                        part, scores, None if balance is None else self.router_coefficient * balance
                    )
                    continue
                embedded = Embedded(model, part.ids) if learns else None
                states = None if embedded is None else embedded.output
                scores = score_pack(
                    model, part, self.temperature, states, wants_top=self.wants_top, **how
                )
                yield Scored(part, scores)
                if embedded is not None:
                    embedded.finish()

    @torch.no_grad()
    def fill(self, table: Table, model: Any, parts: Iterable[Part], ranks: Ranks) -> None:
        """Set the scores of parts in a table, of all ranks, without gradients."""
        places = []
        for one in self.scored(model, parts, balances=False):
            table.store(one.at, one.scores)
            places.append(one.at)
        table.exchange(places, ranks)
