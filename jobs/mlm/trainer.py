"""Trainer for masked language modeling: the data of a step depends on (seed, step) only.

The order of examples and their masks come from counter-based random numbers, so that a resumed run
has the same data as an uninterrupted one. Imports torch: only `run` of the MLM
kind imports it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import TrainingArguments

from ..codegraph.sequences import IGNORED
from ..context import Context
from ..errors import JobFailed
from ..training.evaluation import EvaluatingTrainer
from ..training.options import TrainingSpec
from ..training.snapshot import read_job_state
from .corpus import Corpus
from .objectives import Batch, GraphObjective, Objective, Sample, sum_of_losses, targets

Array = NDArray[Any]

VALIDATION_EPOCH = 2**32 - 1  # the epoch of the fixed validation masks
EVAL_BATCH = 16
_ORDER = 2**63  # first key for the order, distinct from the keys of masks
WINDOW = 32  # steps within which examples are sorted by length
HITS = 10
COLUMNS = (
    "step",
    "total_loss",
    "mlm_loss",
    "mnm_loss",
    "mlm_validation_accuracy",
    "mnm_validation_accuracy",
    "mlm_weight",
    "mnm_weight",
)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of the parts of the loss."""

    mlm: float = 1.0
    mnm: float = 0.0
    mnm_ramp_steps: int = 0  # in which the weight of MNM rises from 0; 0: it is there at once
    constraint: float = 0.0

    def at(self, step: int) -> dict[str, float]:
        """Return the weights in a step, counted from 1."""
        risen = min(1.0, step / self.mnm_ramp_steps) if self.mnm_ramp_steps else 1.0
        return {"mlm": self.mlm, "mnm": self.mnm * risen, "constraint": self.constraint}


class StepOrder:
    """Batch sampler: the examples of every step in micro-batches, reshuffled in every epoch.

    The examples of a step depend on their number, not on the split into micro-batches. The
    remainder of an epoch is dropped.
    """

    def __init__(
        self, lengths: Array, *, micro_batch: int, accumulation: int, steps: int, seed: int
    ) -> None:
        self.lengths = lengths
        self.micro_batch = micro_batch
        self.accumulation = accumulation
        self.steps = steps
        self.seed = seed

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Yield micro-batches of (pass, index)."""
        steps_per_pass = len(self.lengths) // (self.micro_batch * self.accumulation)
        for step in range(self.steps):
            number, within = divmod(step, steps_per_pass)
            if within == 0:
                order = self.order_of_pass(number)
            for micro_batch in order[within].reshape(self.accumulation, self.micro_batch):
                yield [(number, int(index)) for index in micro_batch]

    def order_of_pass(self, number: int) -> Array:
        """Return the indices of a pass, none twice: (steps, examples of a step)."""
        per_step = self.micro_batch * self.accumulation
        key = np.array([self.seed, _ORDER + number], np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        shuffled = generator.permutation(len(self.lengths))
        shuffled = shuffled[: len(shuffled) // per_step * per_step]
        steps = []
        for begin in range(0, len(shuffled), WINDOW * per_step):
            window = shuffled[begin : begin + WINDOW * per_step]
            by_length = window[np.argsort(self.lengths[window], kind="stable")]
            steps.append(generator.permutation(by_length.reshape(-1, per_step)))
        return np.concatenate(steps)


class MaskedExamples(Dataset[Sample]):
    """A subset of a corpus, masked by (epoch, index)."""

    def __init__(self, corpus: Corpus, numbers: Array, objective: Objective) -> None:
        self.corpus = corpus
        self.numbers = numbers
        self.objective = objective

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, item: tuple[int, int]) -> Sample:
        epoch, index = item
        number = int(self.numbers[index])
        return self.objective.mask(self.corpus.example(number), epoch, number)


class Curve:
    """metrics.csv, with one row per step; rewritten from the checkpoint on resume."""

    def __init__(self, path: Path, rows: Iterable[Sequence[float]] = ()) -> None:
        self.path = path
        self.rows = [list(row) for row in rows]
        lines = [",".join(COLUMNS), *map(_csv, self.rows)]
        path.write_text("".join(f"{line}\n" for line in lines))

    def add(self, values: Mapping[str, float]) -> None:
        """Append the row of a step; missing values stay empty."""
        self.rows.append([values.get(name, math.nan) for name in COLUMNS])
        with self.path.open("a") as file:
            file.write(_csv(self.rows[-1]) + "\n")

    def amend(self, values: Mapping[str, float]) -> None:
        """Add values to the last row."""
        row = self.rows[-1]
        with self.path.open("r+") as file:
            file.seek(self.path.stat().st_size - len(_csv(row)) - 1)
            file.truncate()
            row[:] = [values.get(name, old) for name, old in zip(COLUMNS, row, strict=True)]
            file.write(_csv(row) + "\n")


def _csv(row: Sequence[float]) -> str:
    step, *values = row
    return ",".join(
        [str(int(step)), *("" if math.isnan(value) else str(value) for value in values)]
    )


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
        self.curve = Curve(job.run_dir / "metrics.csv")
        self._sums = dict.fromkeys(objective.parts, 0.0)  # of the losses in this step
        self._tokens = 0  # in this step, without padding
        super().__init__(
            job=job,
            spec=spec,
            model=model,
            args=args,
            processing_class=tokenizer,
            eval_every=eval_every if eval_every and len(held_out) else None,
        )
        self.loss_is_scaled_for_ga = True  # by `compute_loss`, whatever the model is

    # Data.

    def get_train_dataloader(self) -> Any:
        order = StepOrder(
            self.corpus.lengths[self.corpus.train],
            micro_batch=self.args.per_device_train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            steps=self.args.max_steps,
            seed=self.args.seed,
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
        self._tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
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

    # Events and state.

    def step_fields(self, logs: dict[str, Any]) -> dict[str, Any]:
        step = self.state.global_step
        weights = self.weights.at(step)
        fields = {
            **super().step_fields(logs),
            **{f"{part}_loss": loss for part, loss in self._sums.items()},
            **{f"{part}_weight": weights[part] for part in self._sums},
            "micro_steps": step * self.args.gradient_accumulation_steps,
            "tokens": self._tokens,
            "seconds": self.step_seconds(),
        }
        self.curve.add({"step": step, "total_loss": fields["loss"], **fields})
        self._sums = dict.fromkeys(self._sums, 0.0)
        return fields

    def job_state(self) -> dict[str, Any]:
        return {
            **super().job_state(),
            "data": self.corpus.name,
            "curve": torch.tensor(self.curve.rows, dtype=torch.float64),
        }

    def check_checkpoint(self, checkpoint: Path) -> None:
        super().check_checkpoint(checkpoint)
        # Before the weights are loaded: a tokenizer of other data may not fit them.
        if read_job_state(checkpoint)["data"] != self.corpus.name:
            raise JobFailed("data: it is not what the checkpoint was trained on")

    def load_job_state(self, state: dict[str, Any]) -> None:
        super().load_job_state(state)
        self.curve = Curve(self.curve.path, state["curve"].tolist())

    # Evaluation.

    def evaluated(self, found: dict[str, Any]) -> None:
        self.curve.amend(
            {
                f"{part}_validation_accuracy": found[f"{part}_acc"]
                for part in ("mlm", "mnm")
                if f"{part}_acc" in found
            }
        )

    @torch.no_grad()
    def measure(self) -> dict[str, Any] | None:
        """Evaluate on all held-out examples with fixed masks; None when stopped.

        Per part: loss, acc (top-1 accuracy), mrr (mean reciprocal rank) and hits10, by rank in the
        whole vocabulary.
        """
        started = time.perf_counter()
        examples = MaskedExamples(self.corpus, self.held_out, self.objective)
        rows = (examples[VALIDATION_EPOCH, index] for index in range(len(examples)))
        ranks: dict[str, list[Tensor]] = {}
        losses: dict[str, float] = {}
        for batch in self._eval_batches(rows):
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
        """Link prediction: rank the tail of the last relation of each example; None when stopped.

        The candidates are the tails of all held-out examples with the same number of tokens, each
        scored by the sum of its log-probabilities with all its tokens masked.
        """
        hidden = [objective.hide_leaf(self.corpus.example(int(i))) for i in self.held_out]
        hidden = [(row, tail) for row, tail in hidden if len(tail)]
        tails = [tuple(tail.tolist()) for _, tail in hidden]
        candidates_by_length: dict[int, Tensor] = {
            length: torch.tensor(sorted({tail for tail in tails if len(tail) == length}))
            for length in {len(tail) for tail in tails}
        }
        ranks: list[Tensor] = []
        for batch in self._eval_batches(row for row, _ in hidden):
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

    def _eval_batches(self, rows: Iterable[Sample]) -> Iterator[Batch | None]:
        """Yield batches for a model in eval mode; None, and no more, when the job is to stop."""
        self.model.eval()
        remaining = iter(rows)
        while some := list(islice(remaining, EVAL_BATCH)):
            if self.job.stop.is_set():
                yield None
                return
            batch = cast(Any, self._prepare_inputs(self.objective.collate(some)))
            yield batch


def rank(logits: Tensor, true: Tensor) -> Tensor:
    """Return the rank of each true token, from 1: (n, V), (n,) -> (n,) float64 on the CPU.

    Ties have their mean rank, so that a uniform distribution scores as chance.
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
