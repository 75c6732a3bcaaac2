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
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from trl.trainer.dpo_config import DPOConfig

from ..context import ONE_PROCESS, Context, Ranks
from ..errors import JobFailed
from ..losses.dpo import SORTING, Pairs, Strength, dpo_loss
from ..sequences.attention import packed_attention
from ..sequences.logprobs import Scores, score_logits
from ..sequences.padding import ROUNDED
from ..sequences.passes import Embedded, exchange, score_pack
from ..sequences.shared_prompts import FIXED, Pack, Sample, split
from ..training.deprecations import no_deprecations
from ..training.loop import Loss
from ..training.reference import copy_shared_weights
from ..training.row_order import micro_batches
from .dataset import Example
from .options import REWARDS

EVAL_PAIRS = 16  # of one batch of an evaluation

Place: TypeAlias = "tuple[Tensor, Tensor]"  # rows and columns of a table


@dataclass(frozen=True)
class MicroBatch:
    """Pairs whose losses are averaged."""

    pairs: Sequence[Example]
    of: int  # micro-batches of its step, whose losses are averaged in turn


class Preferences:
    """The task of a DPO job, which also evaluates it (training.loop.Task, training.loop.Measured).

    The model may share its weights with `reference` (training.reference), or is a PeftModel, and
    the reference (None) is the model without its adapter. `most_tokens`: of a pack; None: padded
    batches. `data` identifies the rows. `args`: a DPOConfig.
    """

    def __init__(
        self,
        *,
        ctx: Context,
        args: DPOConfig,
        model: Any,
        reference: Any | None,
        pad_id: int,
        examples: Sequence[Example],
        held_out: Sequence[Example],
        data: str,
        most_tokens: int | None,
        has_dropout: bool = False,
    ) -> None:
        self.most_tokens = most_tokens
        self._ctx = ctx
        self._args: Any = args
        self._model = model
        self._reference = reference
        self._pad_id = pad_id
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
        pairs = [pair for part in batch for pair in part.pairs]
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
        found = [ROUNDED] if rules < 2 and self.most_tokens is None else []
        if rules < 1:
            found += [] if self.most_tokens is None else [FIXED]
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
        batch = Batch.of(micro_batch.pairs, self._model.device)
        if self.most_tokens is None:
            yield self._loss_of_padded(batch, micro_batch.of)
        else:
            yield from self._losses_of_packs(batch, micro_batch.of, ranks, self.most_tokens)

    def _losses_of_packs(
        self, batch: Batch, num_micro_batches: int, ranks: Ranks, most_tokens: int
    ) -> Iterator[Loss]:
        """Yield a part with gradients for each pack, then one with the loss and its metrics.

        The log-probabilities of other packs are constants. Those of later packs are the reference's
        until they are computed: the pairs of this one do not depend on them.
        """
        device = batch.ids.device
        packs = [Pack(part, device) for part in split(batch.samples, most_tokens, ranks)]
        places = [batch.places(pack) for pack in packs]
        reference = self._reference_scores(batch, packs, places)
        reference.exchange(places, ranks)
        policy = reference.copy()
        learns = torch.is_grad_enabled()
        sorts = self.loss_type in SORTING and (len(packs) > 1 or ranks.size > 1)
        with packed_attention(self._model):
            if not learns or sorts:
                for pack, at in zip(packs, places, strict=True):
                    policy.put(at, self._scores(self._model, pack))
                policy.exchange(places, ranks)
            if learns:
                for pack, at in zip(packs, places, strict=True):
                    embedded = Embedded(self._model, pack.ids)
                    scores = self._scores(self._model, pack, embedded.output)
                    logps = policy.logps.index_put(at, scores.logps)
                    loss = dpo_loss(
                        self.loss_type, batch.pairs(logps, reference.logps), self.strength
                    )
                    yield Loss(loss / num_micro_batches, amount=0.0)
                    embedded.finish()
                    policy.put(at, scores)
                policy.exchange(places, ranks)
        if ranks.rank == 0:  # the tables have the scores of all ranks
            yield self._reported(batch, policy, reference, num_micro_batches)

    @torch.no_grad()
    def _reference_scores(
        self, batch: Batch, packs: Sequence[Pack], places: Sequence[Place]
    ) -> Table:
        found = Table.like(batch)
        with self._reference_model() as model, packed_attention(model):
            for pack, at in zip(packs, places, strict=True):
                found.put(at, self._scores(model, pack))
        return found

    @contextmanager
    def _reference_model(self) -> Iterator[Any]:
        if self._reference is not None:
            yield self._reference
            return
        with no_deprecations(), self._model.disable_adapter():
            yield self._model

    def _scores(self, model: Any, pack: Pack, embedded: Tensor | None = None) -> Scores:
        with torch.set_grad_enabled(embedded is not None):
            return score_pack(
                model, pack, embedded=embedded, is_half=self._args.bf16, wants_top=True
            )

    @torch.no_grad()
    def _reported(
        self, batch: Batch, policy: Table, reference: Table, num_micro_batches: int
    ) -> Loss:
        pairs = batch.pairs(policy.logps, reference.logps)
        loss = dpo_loss(self.loss_type, pairs, self.strength)
        metrics = batch.metrics(policy, pairs, self.strength.beta)
        return Loss(
            loss / num_micro_batches,
            {name: value / num_micro_batches for name, value in metrics.items()},
        )

    def _loss_of_padded(self, batch: Batch, num_micro_batches: int) -> Loss:
        routes = getattr(self._model.config.get_text_config(), "output_router_logits", False)
        at, policy, reference = batch.completion_places, Table.like(batch), Table.like(batch)
        with torch.no_grad(), self._reference_model() as model:
            scores, _ = self._padded_scores(model, batch, {})
            reference.put(at, scores)
        more = {"output_router_logits": True} if routes else {}
        scores, balance = self._padded_scores(self._model, batch, more)
        policy.put(at, scores)
        logps = policy.logps.index_put(at, scores.logps)
        pairs = batch.pairs(logps, reference.logps)
        loss = dpo_loss(self.loss_type, pairs, self.strength)
        if balance is not None:  # of a mixture of experts
            loss = loss + self._args.router_aux_loss_coef * balance
        metrics = batch.metrics(policy, pairs, self.strength.beta)
        return Loss(
            loss / num_micro_batches,
            {name: value / num_micro_batches for name, value in metrics.items()},
        )

    def _padded_scores(
        self, model: Any, batch: Batch, more: Mapping[str, Any]
    ) -> tuple[Scores, Tensor | None]:
        """Return the scores of the completion tokens, and the loss that balances experts."""
        ids, is_token = batch.padded(self._pad_id)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._args.bf16):
            output = model(input_ids=ids, attention_mask=is_token, use_cache=False, **more)
        rows, columns = batch.completion_places
        scores = score_logits(output.logits[rows, columns], ids[rows, columns + 1])
        return scores, output.aux_loss if more else None


@dataclass(frozen=True)
class Batch:
    """B pairs as 2B sequences, first the chosen ones, in tables of T - 1 columns.

    T: the tokens of the longest sequence. Column t of a table has the score of token t + 1. The
    first token of a sequence is never predicted: it counts as a prompt if there is none.
    """

    samples: list[tuple[Sample, Sample]]  # by pair: chosen, rejected
    lengths: Tensor  # (2B,) tokens of each completion
    ids: Tensor  # (2B, T - 1) like a table, of the device

    @classmethod
    def of(cls, pairs: Sequence[Example], device: Any) -> Batch:
        rows = [
            (pair.prompt, side)
            for sides in (
                [pair.chosen for pair in pairs],
                [pair.rejected for pair in pairs],
            )
            for pair, side in zip(pairs, sides, strict=True)
        ]
        samples = []
        for row, (prompt, completion) in enumerate(rows):
            whole = (*prompt, *completion)
            begin = max(len(prompt), 1)
            samples.append(Sample(row, whole[:begin], whole[begin:]))
        half = len(pairs)
        longest = max(len(prompt) + len(completion) for prompt, completion in rows)
        return cls(
            list(zip(samples[:half], samples[half:], strict=True)),
            torch.tensor([len(completion) for _, completion in rows], device=device),
            torch.zeros((len(rows), longest - 1), dtype=torch.int64, device=device),
        )

    @property
    def rows(self) -> list[Sample]:
        """The sequences in their order."""
        return [pair[side] for side in (0, 1) for pair in self.samples]

    def places(self, pack: Pack) -> Place:
        """Return the places of a pack's completion tokens in a table."""
        begins = torch.tensor([len(row.prompt) for row in self.rows], device=self.ids.device)
        return pack.rows, begins[pack.rows] - 1 + pack.columns

    @property
    def completion_places(self) -> Place:
        """The places of all completion tokens in a table."""
        places = [
            (number, column)
            for number, row in enumerate(self.rows)
            for column in range(len(row.prompt) - 1, len(row.prompt) + len(row.completion) - 1)
        ]
        rows, columns = torch.tensor(places, device=self.ids.device).view(-1, 2).unbind(1)
        return rows, columns

    def padded(self, pad_id: int) -> tuple[Tensor, Tensor]:
        """Return ids and attention mask, (2B, T) int64, padded on the right."""
        ids = self.ids.new_full((len(self.ids), self.ids.shape[1] + 1), pad_id)
        is_token = torch.zeros_like(ids)
        for number, row in enumerate(self.rows):
            tokens = (*row.prompt, *row.completion)
            ids[number, : len(tokens)] = torch.tensor(tokens, device=ids.device)
            is_token[number, : len(tokens)] = 1
        return ids, is_token

    def pairs(self, policy: Tensor, reference: Tensor) -> Pairs:
        """Return the pairs of the loss, from tables of log-probabilities."""
        chosen, rejected = policy.sum(1).chunk(2)
        reference_chosen, reference_rejected = reference.sum(1).chunk(2)
        return Pairs(chosen, rejected, reference_chosen, reference_rejected, *self.lengths.chunk(2))

    def metrics(self, policy: Table, pairs: Pairs, beta: float) -> dict[str, float]:
        """Return the metrics of TRL, by their names."""
        half = len(self.samples)
        scored = [len(row.completion) for row in self.rows]
        chosen = beta * pairs.chosen_ratios.detach()
        rejected = beta * pairs.rejected_ratios.detach()
        return {
            "mean_token_accuracy": float(policy.is_top[:half].sum()) / max(sum(scored[:half]), 1),
            "entropy": float(policy.entropies.sum()) / max(sum(scored), 1),
            "rewards/chosen": float(chosen.mean()),
            "rewards/rejected": float(rejected.mean()),
            "rewards/margins": float((chosen - rejected).mean()),
            "rewards/accuracies": float((chosen > rejected).float().mean()),
        }


@dataclass(frozen=True)
class Table:
    """Scores of the completion tokens of a batch, (2B, T - 1) each, 0 elsewhere."""

    logps: Tensor
    entropies: Tensor
    is_top: Tensor

    @classmethod
    def like(cls, batch: Batch) -> Table:
        zeros = torch.zeros(batch.ids.shape, device=batch.ids.device)
        return cls(zeros, zeros.clone(), zeros.bool())

    def copy(self) -> Table:
        return Table(self.logps.clone(), self.entropies.clone(), self.is_top.clone())

    def put(self, at: Place, scores: Scores) -> None:
        """Set the scores of completion tokens."""
        self.logps[at] = scores.logps.detach()
        self.entropies[at] = scores.entropies
        self.is_top[at] = scores.is_top

    def exchange(self, places: Sequence[Place], ranks: Ranks) -> None:
        """Set the scores of the other ranks' tokens; `places`: of this rank's."""
        exchange(places, (self.logps, self.entropies, self.is_top), ranks)
