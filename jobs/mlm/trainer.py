"""Trainer for masked language modeling: losses of a step, evaluation, link prediction.

Imports torch: only `run` of the MLM kind imports it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from ..codegraph.sequences import IGNORED
from ..context import Context
from ..data.corpus import Corpus
from ..errors import JobFailed
from ..training.evaluation import EvaluatingTrainer
from ..training.options import TrainingSpec
from ..training.snapshot import read_job_state
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


class MaskedTrainer(EvaluatingTrainer):
    """Trains a model on a corpus and evaluates it on the examples `held_out`."""

    model: Any
    objective: Objective

    def __init__(
        self,
        *,
        job: Context,
        spec: TrainingSpec,
        args: TrainingArguments,
        model: Any,
        tokenizer: Any,
        corpus: Corpus,
        held_out: Array,
        objective: Objective,
        weights: Weights,
        eval_every: int,
    ) -> None:
        self.corpus = corpus
        # Sorted by length, so that evaluation batches have little padding.
        self.held_out = held_out[np.argsort(corpus.lengths[held_out], kind="stable")]
        self.objective = objective
        self.weights = weights
        # Rank 0 writes the file; the others have none.
        self.curve = Curve(job.run_dir / "metrics.csv") if job.ranks.rank == 0 else None
        self._sums = dict.fromkeys(objective.parts, 0.0)  # losses of the current step
        self._tokens = 0  # of the current step, without padding
        super().__init__(
            job=job,
            spec=spec,
            model=model,
            args=args,
            processing_class=tokenizer,
            eval_every=eval_every if eval_every and len(held_out) else None,
        )
        self.loss_is_scaled_for_ga = True  # `compute_loss` scales it, for every model

    # Data.

    def get_train_dataloader(self) -> Any:
        order = StepOrder(
            self.corpus.lengths[self.corpus.train],
            micro_batch=self.args.per_device_train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            steps=self.args.max_steps,
            seed=self.args.seed,
            ranks=self.ranks,
        )
        return DataLoader(
            MaskedExamples(self.corpus, self.corpus.train, self.objective),
            batch_sampler=cast(Any, order),
            collate_fn=cast(Any, self.objective.collate),
            generator=torch.Generator(),  # otherwise it would draw from the global one
        )

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Any]:
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        # Losses are means over the whole step, so the counts of all micro-batches are needed.
        counts: dict[str, int] = {
            part: sum(len(targets(batch, part)) for batch in batches)
            for part in ("mlm", "mnm")
            if part in self.objective.parts
        }
        counts["rows"] = sum(len(batch["input_ids"]) for batch in batches)
        counts["tokens"] = sum(int(batch["attention_mask"].sum()) for batch in batches)
        of_all = torch.tensor(list(counts.values()))
        self.ranks.sum(of_all)
        counts = dict(zip(counts, of_all.tolist(), strict=True))
        self._tokens = counts["tokens"]
        return batches, counts

    # The loss.

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        losses = self.objective.losses(model, inputs, num_items_in_batch)
        weights = self.weights.at(self.state.global_step + 1)
        for part, loss in losses.items():
            self._sums[part] += float(loss.detach())
        return sum(weights[part] * loss for part, loss in losses.items())

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.ranks.sum(loss)  # of the parts of a micro-batch
        return loss

    # Events and state.

    def step_fields(self, logs: dict[str, Any]) -> dict[str, Any]:
        step = self.state.global_step
        weights = self.weights.at(step)
        sums = torch.tensor(list(self._sums.values()), dtype=torch.float64)
        self.ranks.sum(sums)
        self._sums = dict(zip(self._sums, sums.tolist(), strict=True))
        fields = {
            **super().step_fields(logs),
            **{f"{part}_loss": loss for part, loss in self._sums.items()},
            **{f"{part}_weight": weights[part] for part in self._sums},
            "micro_steps": step * self.args.gradient_accumulation_steps,
            "tokens": self._tokens,
            "seconds": self.step_seconds(),
        }
        if self.curve is not None:
            row = {"step": step, "total_loss": fields["loss"], **fields}
            self.job.patiently(partial(self.curve.add, row), self.job.run_dir)
        self._sums = dict.fromkeys(self._sums, 0.0)
        return fields

    def job_state(self) -> dict[str, Any]:
        assert self.curve is not None  # rank 0 saves
        return {
            **super().job_state(),
            "data": self.corpus.name,
            "curve": torch.tensor(self.curve.rows, dtype=torch.float64),
        }

    def check_checkpoint(self, checkpoint: Path) -> None:
        super().check_checkpoint(checkpoint)
        # Before the weights are loaded: a tokenizer of other data may not fit them.
        if read_job_state(checkpoint)["data"] != self.corpus.name:
            raise JobFailed("data: must be the data that the checkpoint was trained on")

    def load_job_state(self, state: dict[str, Any]) -> None:
        super().load_job_state(state)
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
        self.job.patiently(partial(self.curve.amend, accuracies), self.job.run_dir)

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
            for part, logits in self.objective.logits(self.model, batch).items():
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
            logits = objective.logits(self.model, batch)["mnm"]
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
        self.model.eval()
        remaining = iter(samples)
        while some := list(islice(remaining, EVAL_BATCH)):
            if self.job.stop.is_set():
                yield None
                return
            batch = cast(Any, self._prepare_inputs(self.objective.collate(some)))
            yield batch


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
