"""What MLM computes: the losses of a step, evaluation, link prediction (training.loop.Task).

Imports torch: only `run` of the MLM kind imports it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..codegraph.sequences import IGNORED
from ..context import Context
from ..data.corpus import Corpus
from ..errors import JobFailed
from ..training.loop import Loss
from .curve import Curve
from .data_order import VALIDATION_EPOCH, Array, MaskedExamples, StepOrder
from .objectives import Batch, GraphObjective, Objective, Sample, sum_of_losses, targets

EVAL_BATCH = 16  # sequences of an evaluation batch
HITS = 10  # rank up to which a prediction counts as a hit


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of the parts of the loss."""

    mlm: float = 1.0
    mnm: float = 0.0
    mnm_ramp_steps: int = 0  # steps in which the weight of MNM rises linearly from 0; 0: no ramp
    constraint: float = 0.0

    def at(self, step: int) -> dict[str, float]:
        """Return the weights at a step, counted from 1."""
        ramp = min(1.0, step / self.mnm_ramp_steps) if self.mnm_ramp_steps else 1.0
        return {"mlm": self.mlm, "mnm": self.mnm * ramp, "constraint": self.constraint}


@dataclass(frozen=True)
class MicroBatch:
    """Masked examples, and the counts by which their losses are divided."""

    batch: Batch
    counts: Mapping[str, int]  # of the whole step, over all ranks: labels by part, rows, tokens
    step: int  # from 1


class MaskedModeling:
    """The task of an MLM job, which also evaluates it (training.loop.Task, training.loop.Measured).

    `args`: transformers.TrainingArguments. `held_out`: the numbers of the examples to evaluate.
    """

    def __init__(
        self,
        *,
        ctx: Context,
        args: Any,
        model: Any,
        corpus: Corpus,
        held_out: Array,
        objective: Objective,
        weights: Weights,
    ) -> None:
        self.corpus = corpus
        # Sorted by length, so that evaluation batches have little padding.
        self.held_out = held_out[np.argsort(corpus.lengths[held_out], kind="stable")]
        self.objective = objective
        self.weights = weights
        # Rank 0 writes the file; the others have none.
        self.curve = Curve(ctx.run_dir / "metrics.csv") if ctx.ranks.rank == 0 else None
        self._ctx = ctx
        self._args = args
        self._model = model

    def batches(self, first_step: int) -> Iterator[Sequence[MicroBatch]]:
        order = StepOrder(
            self.corpus.lengths[self.corpus.train],
            micro_batch=self._args.per_device_train_batch_size,
            accumulation=self._args.gradient_accumulation_steps,
            seed=self._args.seed,
            ranks=self._ctx.ranks,
        )
        examples = MaskedExamples(self.corpus, self.corpus.train, self.objective)
        for step, items in enumerate(order.steps_from(first_step), first_step + 1):
            made = [self.objective.collate([examples[item] for item in part]) for part in items]
            # Losses are means over the whole step, so the counts of all micro-batches are needed.
            counts = self._counts(made)
            yield [MicroBatch(self._on_device(batch), counts, step) for batch in made]

    def _counts(self, batches: Sequence[Batch]) -> dict[str, int]:
        counts: dict[str, int] = {
            part: sum(len(targets(batch, part)) for batch in batches)
            for part in ("mlm", "mnm")
            if part in self.objective.parts
        }
        counts["rows"] = sum(len(batch["input_ids"]) for batch in batches)
        counts["tokens"] = sum(int(batch["attention_mask"].sum()) for batch in batches)
        of_all = torch.tensor(list(counts.values()))
        self._ctx.ranks.sum(of_all)
        return dict(zip(counts, of_all.tolist(), strict=True))

    def loss(self, micro_batch: MicroBatch) -> Iterator[Loss]:
        device = self._args.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self._args.bf16):
            losses = self.objective.losses(self._model, micro_batch.batch, micro_batch.counts)
        weights = self.weights.at(micro_batch.step)
        yield Loss(
            cast(Tensor, sum(weights[part] * loss for part, loss in losses.items())),
            {f"{part}_loss": float(loss.detach()) for part, loss in losses.items()},
        )

    def fields(self, batch: Sequence[MicroBatch], sums: Mapping[str, float]) -> dict[str, Any]:
        step, parts = batch[0].step, self.objective.parts
        weights = self.weights.at(step)
        return {
            **{f"{part}_loss": sums[f"{part}_loss"] for part in parts},
            **{f"{part}_weight": weights[part] for part in parts},
            "micro_steps": step * self._args.gradient_accumulation_steps,
            "tokens": batch[0].counts["tokens"],
        }

    def trained(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a step to the curve, before its event."""
        if self.curve is not None:
            row = {"step": step, "total_loss": metrics["loss"], **metrics}
            self._ctx.patiently(partial(self.curve.add, row), self._ctx.run_dir)

    def state(self) -> dict[str, Any]:
        assert self.curve is not None  # rank 0 saves
        return {
            "data": self.corpus.name,
            "curve": torch.tensor(self.curve.rows, dtype=torch.float64),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        if state["data"] != self.corpus.name:
            raise JobFailed("data: must be the data that the checkpoint was trained on")
        if self.curve is not None:
            self.curve = Curve(self.curve.path, state["curve"].tolist())

    # Evaluation.

    def evaluated(self, found: dict[str, Any]) -> None:
        assert self.curve is not None  # rank 0 evaluates
        accuracies = {
            f"{part}_validation_accuracy": found[f"{part}_acc"]
            for part in ("mlm", "mnm")
            if f"{part}_acc" in found
        }
        self._ctx.patiently(partial(self.curve.amend, accuracies), self._ctx.run_dir)

    @torch.no_grad()
    def measure(self) -> dict[str, Any] | None:
        """Evaluate on all held-out examples with fixed masks; return None if the job must stop.

        Per part: loss, acc (top-1 accuracy), mrr (mean reciprocal rank) and hits10 (share of ranks
        up to 10), ranked in the whole vocabulary.
        """
        started = time.perf_counter()
        examples = MaskedExamples(self.corpus, self.held_out, self.objective)
        masked = (examples[VALIDATION_EPOCH, index] for index in range(len(examples)))
        ranks: dict[str, list[Tensor]] = {}
        losses: dict[str, float] = {}
        for batch in self._eval_batches(masked):
            if batch is None:
                return None
            for part, logits in self.objective.logits(self._model, batch).items():
                true = targets(batch, part)
                ranks.setdefault(part, []).append(rank(logits, true))
                losses[part] = losses.get(part, 0.0) + float(sum_of_losses(logits, true))
        found: dict[str, Any] = {"n": len(examples)}
        for part, of_part in ranks.items():
            found |= _summary(part, torch.cat(of_part), losses[part])
        if isinstance(self.objective, GraphObjective):
            link = self._link_prediction(self.objective)
            if link is None:
                return None
            found |= link
        return {**found, "seconds": time.perf_counter() - started}

    def _link_prediction(self, objective: GraphObjective) -> dict[str, Any] | None:
        """Link prediction: rank the tail of each example's last triple; None if the job must stop.

        The candidates are the tails of all held-out examples with the same number of tokens. A
        candidate's score is the sum of its tokens' log-probabilities, all of them masked.
        """
        hidden = [objective.hide_leaf(self.corpus.example(int(i))) for i in self.held_out]
        hidden = [(sample, tail) for sample, tail in hidden if len(tail)]
        tails = [tuple(tail.tolist()) for _, tail in hidden]
        candidates_by_length: dict[int, Tensor] = {
            length: torch.tensor(sorted({tail for tail in tails if len(tail) == length}))
            for length in {len(tail) for tail in tails}
        }
        ranks: list[Tensor] = []
        for batch in self._eval_batches(sample for sample, _ in hidden):
            if batch is None:
                return None
            logits = objective.logits(self._model, batch)["mnm"]
            logps = torch.log_softmax(logits.float(), -1).cpu()
            sizes = (batch["mnm_labels"] != IGNORED).sum(1).tolist()
            for logp in torch.split_with_sizes(logps, sizes):  # each (L, V)
                tail = torch.tensor(tails[len(ranks)])
                candidates = candidates_by_length[len(tail)]  # (C, L)
                scores = logp[torch.arange(len(tail)), candidates].sum(1)
                is_true = (candidates == tail).all(1).nonzero()[0]
                ranks.append(rank(scores[None], is_true))
        if not ranks:
            return {}
        num_candidates = sum(len(candidates_by_length[len(tail)]) for tail in tails) / len(tails)
        mrr = float((1 / torch.cat(ranks)).mean())
        return {"link_mrr": mrr, "link_candidates": num_candidates, "links": len(ranks)}

    def _eval_batches(self, samples: Iterable[Sample]) -> Iterator[Batch | None]:
        """Set eval mode and yield batches; yield None and end if the job must stop."""
        self._model.eval()
        remaining = iter(samples)
        while some := list(islice(remaining, EVAL_BATCH)):
            if self._ctx.stop.is_set():
                yield None
                return
            yield self._on_device(self.objective.collate(some))

    def _on_device(self, batch: Batch) -> Batch:
        return {name: values.to(self._args.device) for name, values in batch.items()}


def rank(logits: Tensor, true: Tensor) -> Tensor:
    """Return the rank of each true token, from 1: (n, V), (n,) -> (n,) float64 on the CPU.

    Ties get their mean rank, so that a uniform distribution scores at chance level.
    """
    of_true = logits.gather(1, true[:, None])
    above = (logits > of_true).sum(1)
    equal = (logits == of_true).sum(1)
    return (above + (equal + 1) / 2).double().cpu()


def _summary(part: str, ranks: Tensor, loss: float) -> dict[str, Any]:
    count = max(len(ranks), 1)
    return {
        f"{part}_loss": loss / count,
        f"{part}_acc": float((ranks == 1).sum()) / count,
        f"{part}_mrr": float((1 / ranks).sum()) / count,
        f"{part}_hits{HITS}": float((ranks <= HITS).sum()) / count,
        f"{part}_tokens": len(ranks),
    }
