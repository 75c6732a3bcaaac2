"""Runs a job that trains on the rows of a data set; shared by its kinds (SFT, DPO).

Imports torch only in its functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from ..context import Context, WarmModel
from ..data import left_out
from ..data.lengths import divergence_warning, truncation_warning
from ..data.reader import (
    progress,
    report_former,
    report_shared,
    report_skipped,
    report_splits,
)
from ..errors import JobFailed
from ..models.architectures import check_can_generate
from ..models.chat_templates import chat_template_of, shown_prompt
from ..models.vocabulary import Vocabulary
from ..sequences.padding import check_padding
from .begin import announce, run_to_end
from .row_options import RowTrainingSpec
from .rows import Rows
from .same_inputs import require_same
from .tokens import E, Encoder, Examples, tokenized

if TYPE_CHECKING:
    from .loop import Training


@dataclass(frozen=True)
class Prepared(Generic[E]):
    """What a training on rows is made of.

    `began`, `ended`: when it was prepared, by time.perf_counter.
    """

    spec: Any  # a RowTrainingSpec
    ctx: Context
    warm: WarmModel
    checkpoint: Path | None  # to resume from
    rows: Rows[Any]
    how: Encoder[E]
    examples: Examples[E]
    held_out: Examples[E]
    steps: int | None  # None: planned from the time limit
    began: float
    ended: float


def prepare(
    spec: RowTrainingSpec,
    ctx: Context,
    warm: WarmModel,
    kind: type[E],
    encoder_of: Callable[[Rows[Any]], Encoder[E]],
    checkpoint: Path | None = None,
) -> Prepared[E]:
    """Read and tokenize the rows of a job. Raises Stopped and JobFailed."""
    began = time.perf_counter()
    check_can_generate(warm.model)
    if warm.tokenizer.eos_token is None:
        raise JobFailed(f"model: the tokenizer of {spec.model} has no end-of-sequence token")
    rows = load_rows(spec, ctx)
    how = encoder_of(rows)
    check_padding(warm)
    examples, held_out = encode(spec, ctx, rows, how, warm, kind, checkpoint)
    steps = planned_steps(spec, ctx, examples, checkpoint)
    known = (spec, ctx, warm, checkpoint, rows, how, examples, held_out, steps)
    return Prepared(*known, began, time.perf_counter())


def training_of(data: Prepared[Any], args: Any, model: Any, task: Any, **hooks: Any) -> Training:
    """Return the training of a task, which also measures the held-out rows."""
    from .loop import Training

    return Training(
        ctx=data.ctx,
        spec=data.spec,
        args=args,
        model=model,
        tokenizer=data.warm.tokenizer,
        task=task,
        measured=task if data.held_out else None,
        eval_every=data.spec.eval_every,
        differences_since=task.differences_since,
        **hooks,
    )


def load_rows(spec: RowTrainingSpec, ctx: Context) -> Rows[Any]:
    """Read the rows of a job; report how many were skipped."""
    rows: Rows[Any] = replace(spec.source, rules=ctx.rules).load()
    report_splits(ctx.emit, "dataset", spec.dataset, spec.eval_dataset, former=rows.reading.former)
    report_former(ctx.emit, rows.reading.former)
    report_skipped(ctx.emit, rows.reading)
    report_shared(ctx.emit, rows.num_shared, len(rows.held_out))
    return rows


def encode(
    spec: RowTrainingSpec,
    ctx: Context,
    rows: Rows[Any],
    how: Encoder[E],
    warm: WarmModel,
    kind: type[E],
    checkpoint: Path | None,
) -> tuple[Examples[E], Examples[E]]:
    """Return the examples to train on and those held out; report their lengths.

    Raises Stopped, and JobFailed if none is left or if one has tokens beyond the vocabulary.
    """

    # Nearly all models have an embedding for each token: then nothing has to be looked up.
    vocabulary = Vocabulary.of(spec.model, warm.model, how.tokenizer) if warm.unembedded else None

    corpus = ctx.ranks.after_first(
        lambda: tokenized(
            ctx.cache_dir,
            spec.kind,
            rows,
            how,
            partial(ctx.check_stop, checkpoint),
            progress(ctx.emit),
            vocabulary,
        )
    )
    require_same(ctx.ranks, "dataset", {"content": corpus.name})
    for part, lengths in corpus.facts.items():
        if lengths["rows"]:
            ctx.emit("lengths", part=part, cached=not corpus.is_new, **lengths)
            for find in (divergence_warning, truncation_warning) if checkpoint is None else ():
                if (warning := find(lengths)) is not None:
                    ctx.emit("warning", message=warning)
    return Examples(corpus, corpus.train, kind), Examples(corpus, corpus.validation, kind)


def planned_steps(
    spec: RowTrainingSpec, ctx: Context, examples: Examples[Any], checkpoint: Path | None
) -> int | None:
    """Return the optimizer steps of the job; report if they are fewer since rows were dropped.

    They are planned on the examples that are left, as TRL does. None: the job has a time limit.
    """
    if spec.time_limit is not None:
        return None
    kept, given = len(examples), spec.samples or 0
    steps = spec.steps_for(kept)
    if steps == spec.steps_total or ctx.rules < 1:  # earlier versions planned on all rows
        return spec.steps_total
    if checkpoint is None:
        ctx.emit(
            "warning",
            message=f"max_length: leaves no token to learn in {given - kept} of {given} records, "
            f"which are left out: {steps} steps instead of {spec.steps_total}",
        )
    return steps


def run_training(
    data: Prepared[Any],
    training: Training,
    *,
    most_tokens: int | None,
    measured: Sequence[str],
    **about: Any,
) -> dict[str, Any]:
    """Train to the end, evaluate before and after, write the model; return the job's result.

    `measured`: the fields of an evaluation that the result has. `about`: further fields of the
    `begin` event. Raises Stopped and JobFailed.
    """
    spec, rows, trainer_s = data.spec, data.rows, time.perf_counter() - data.ended
    gemm = announce(
        training,
        data.checkpoint,
        model=spec.model,
        batch_size=spec.batch_size,
        gradient_accumulation=spec.gradient_accumulation,
        packing=most_tokens is not None,  # false: padded batches
        pack_tokens=most_tokens,  # most in one pass of the model
        left_out=left_out.of_job(
            "dataset", spec.dataset, spec.eval_dataset, readings=[rows.reading]
        ),
        first_prompt=shown_prompt(
            next(iter(rows.train)).opening, chat_template_of(training.tokenizer)
        ),
        max_length=data.how.max_length,
        **about,
        data_s=data.ended - data.began,
        trainer_s=trainer_s,
    )
    run_to_end(training, data.checkpoint, gemm)
    return {
        "steps": training.step,
        "eval_before": _chosen(training.before, measured),
        "eval_after": _chosen(training.last_eval, measured),
        "model": "model",
        "metrics": training.last_metrics,
        **training.planned,
    }


def _chosen(evaluation: Mapping[str, Any] | None, names: Sequence[str]) -> dict[str, Any] | None:
    return None if evaluation is None else {name: evaluation[name] for name in (*names, "n")}
