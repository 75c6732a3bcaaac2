"""What DPO computes: a loss over pairs of completions, relative to a frozen model (loop.Task).

Both completions of a pair share one prompt in a pack: the prompt is computed once, nothing is
padded, and the vocabulary head runs at completion tokens only. The reference model is computed on
the same packs: with equal weights every reward is exactly 0. A model that cannot be packed exactly
gets padded batches. Imports torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl.trainer.dpo_config import DPOConfig

from ..context import ONE_PROCESS, Context, Ranks
from ..errors import JobFailed
from ..losses.dpo import SORTING, Pairs, Strength, dpo_loss
from ..sequences.packs import FIXED
from ..sequences.padding import ROUNDED
from ..sequences.scoring import Scorer, Table
from ..sequences.sequence import Sequence as Tokens
from ..training.loop import Loss
from ..training.reference import copy_shared_weights, reference_of
from ..training.row_order import micro_batches
from .dataset import Example
from .options import REWARDS

EVAL_PAIRS = 16  # of one batch of an evaluation


@dataclass(frozen=True)
class MicroBatch:
    """Pairs whose losses are averaged."""

    rows: Sequence[Example]
    of: int  # micro-batches of its step, whose losses are averaged in turn


class Preferences:
    """The task of a DPO job, which also evaluates it (training.loop.Task, training.loop.Measured).

    The model may share its weights with `reference` (training.reference), or is a PeftModel, and
    the reference (None) is the model without its adapter. `data` identifies the rows.
    `args`: a DPOConfig.
    """

    def __init__(
        self,
        *,
        ctx: Context,
        args: DPOConfig,
        model: Any,
        reference: Any | None,
        scorer: Scorer,
        examples: Sequence[Example],
        held_out: Sequence[Example],
        data: str,
        has_dropout: bool = False,
    ) -> None:
        self.scorer = scorer
        self._ctx = ctx
        self._args: Any = args
        self._model = model
        self._reference = reference
        self._examples = examples
        self._held_out = held_out
        self._data = data
        self._has_dropout = has_dropout
        (self.loss_type,) = args.loss_type
        self.strength = Strength(
            beta=args.beta,
            label_smoothing=args.label_smoothing,
            discopop_tau=args.discopop_tau,
        )

    def batches(self, first_step: int) -> Iterator[Sequence[MicroBatch]]:
        for parts in micro_batches(self._examples, self._args, first_step):
            yield [MicroBatch(part, len(parts)) for part in parts]

    def loss(self, micro_batch: MicroBatch) -> Iterator[Loss]:
        yield from self._losses(micro_batch, self._ctx.ranks)

    def fields(self, batch: Sequence[MicroBatch], sums: Mapping[str, float]) -> dict[str, Any]:
        pairs = [pair for part in batch for pair in part.rows]
        sizes = (2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected) for pair in pairs)
        names = ("mean_token_accuracy", "entropy")
        return {
            **{name: sums[name] for name in names},
            "tokens": sum(sizes),
            **{name: sums[name] for name in REWARDS},
        }

    def state(self) -> dict[str, Any]:
        return {"data": self._data}

    def load(self, state: Mapping[str, Any]) -> None:
        if state["data"] != self._data:
            raise JobFailed("dataset: its rows are not those that the checkpoint was trained on")
        self.before_update()

    def before_update(self) -> None:
        """Keep the reference as it is: give the model weights of its own."""
        if self._reference is not None:
            copy_shared_weights(self._model, self._reference)

    def differences_since(self, rules: int) -> list[str]:
        """Return how results differ from those of a version with these RULES."""
        found = [ROUNDED] if rules < 2 and self.scorer.most_tokens is None else []
        if rules < 1:
            found += [] if self.scorer.most_tokens is None else [FIXED]
            found += ["lora_dropout has an effect (it had none)"] if self._has_dropout else []
        return found

    @torch.no_grad()
    def measure(self) -> dict[str, Any] | None:
        """Return the means of loss and rewards over the held-out pairs, or None when stopped."""
        started = time.perf_counter()
        was_training = self._model.training
        self._model.eval()
        sums = dict.fromkeys(("loss", *REWARDS), 0.0)
        by_length = sorted(self._held_out, key=lambda example: example.longest)
        for first in range(0, len(by_length), EVAL_PAIRS):
            if self._ctx.stop.is_set():
                return None
            pairs = by_length[first : first + EVAL_PAIRS]
            for part in self._losses(MicroBatch(pairs, 1), ONE_PROCESS):
                found = {"loss": float(part.value), **{name: part.sums[name] for name in REWARDS}}
                for name, value in found.items():
                    sums[name] = math.fsum((sums[name], value * len(pairs)))
        self._model.train(was_training)
        return {
            **{name: total / len(by_length) for name, total in sums.items()},
            "n": len(by_length),
            "eval_s": time.perf_counter() - started,
        }

    def evaluated(self, found: dict[str, Any]) -> None:
        """Nothing depends on an evaluation."""

    def _losses(self, micro_batch: MicroBatch, ranks: Ranks) -> Iterator[Loss]:
        """Yield a part with gradients for each pass, then one with the loss and its metrics.

        The log-probabilities of other passes are constants. Those of later passes are the
        reference's until they are computed: the pairs of this one do not depend on them.
        """
        batch, scorer, model = Batch.of(micro_batch.rows), self.scorer, self._model
        parts = scorer.parts(batch.sequences, model.device, ranks)
        reference = Table.empty(batch.shape, model.device, wants_top=True)
        with reference_of(model, self._reference) as other:
            scorer.fill(reference, other, parts, ranks)
        policy = reference.copy()
        learns = torch.is_grad_enabled()
        if learns and self.loss_type in SORTING and (len(parts) > 1 or ranks.size > 1):
            scorer.fill(policy, model, parts, ranks)
        places, balance = [], torch.tensor(0.0)
        for one in scorer.scored(model, parts):
            if learns:
                logps = policy.put(one.at, one.scores).logps
                loss = dpo_loss(self.loss_type, batch.pairs(logps, reference.logps), self.strength)
                loss = loss if one.balance is None else loss + one.balance
                yield Loss(loss / micro_batch.of, amount=0.0)
            if one.balance is not None:  # of padded batches, which have one part
                balance = one.balance.detach()
            policy.store(one.at, one.scores)
            places.append(one.at)
        policy.exchange(places, ranks)
        if ranks.rank == 0:  # the tables have the scores of all ranks
            yield self._reported(batch, policy, reference, balance, micro_batch.of)

    @torch.no_grad()
    def _reported(
        self, batch: Batch, policy: Table, reference: Table, balance: Tensor, of: int
    ) -> Loss:
        pairs = batch.pairs(policy.logps, reference.logps)
        loss = dpo_loss(self.loss_type, pairs, self.strength) + balance.to(policy.logps.device)
        metrics = batch.metrics(policy, pairs, self.strength.beta)
        return Loss(loss / of, {name: value / of for name, value in metrics.items()})


@dataclass(frozen=True)
class Batch:
    """B pairs as 2B sequences, first the chosen ones, in tables of T - 1 columns.

    T: the tokens of the longest sequence. Column t of a table has the score of token t + 1. The
    first token of a sequence is never predicted: it counts as a prompt if there is none.
    """

    sequences: list[tuple[Tokens, Tokens]]  # by pair: chosen, rejected
    lengths: list[int]  # (2B,) tokens of each completion

    @classmethod
    def of(cls, pairs: Sequence[Example]) -> Batch:
        sides = [
            (pair.prompt, side)
            for completions in ([pair.chosen for pair in pairs], [pair.rejected for pair in pairs])
            for pair, side in zip(pairs, completions, strict=True)
        ]
        sequences = []
        for row, (prompt, completion) in enumerate(sides):
            begin = max(len(prompt), 1)
            ids = (*prompt, *completion)
            weights = (0.0,) * begin + (1.0,) * (len(ids) - begin)
            sequences.append(Tokens(ids, weights, row, column=-1, shared=begin))
        half = len(pairs)
        lengths = [len(completion) for _, completion in sides]
        return cls(list(zip(sequences[:half], sequences[half:], strict=True)), lengths)

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and columns of a table."""
        longest = max(len(one.tokens) for pair in self.sequences for one in pair)
        return 2 * len(self.sequences), longest - 1

    def pairs(self, policy: Tensor, reference: Tensor) -> Pairs:
        """Return the pairs of the loss, from tables of log-probabilities."""
        lengths = torch.tensor(self.lengths, device=policy.device)
        tables = (policy.sum(1), reference.sum(1), lengths)
        (chosen, rejected), (of_chosen, of_rejected), sizes = (one.chunk(2) for one in tables)
        return Pairs(chosen, rejected, of_chosen, of_rejected, *sizes)

    def metrics(self, policy: Table, pairs: Pairs, beta: float) -> dict[str, float]:
        """Return the metrics of TRL, by their names."""
        half = len(self.sequences)
        scored = [
            sum(len(one.scored) for one in side) for side in zip(*self.sequences, strict=True)
        ]
        chosen = beta * pairs.chosen_ratios.detach()
        rejected = beta * pairs.rejected_ratios.detach()
        assert policy.is_top is not None
        return {
            "mean_token_accuracy": float(policy.is_top[:half].sum()) / max(scored[0], 1),
            "entropy": float(policy.entropies.sum()) / max(sum(scored), 1),
            "rewards/chosen": float(chosen.mean()),
            "rewards/rejected": float(rejected.mean()),
            "rewards/margins": float((chosen - rejected).mean()),
            "rewards/accuracies": float((chosen > rejected).float().mean()),
        }
