"""The GRPO kind: train on groups of sampled completions and their rewards (arXiv:2402.03300).

`options.py` has the options; `setup.py` builds rewards or environment, task and loop, and `step.py`
has the steps: both import torch.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

from ..context import Context, step_of
from ..data import left_out
from ..data.reader import report_former, report_shared, report_skipped, report_splits
from ..environments import journal
from ..models.architectures import check_can_generate
from ..models.generation_settings import of_rollouts_words
from ..models.pretrained_tokenizer import appended_end_words
from ..models.vocabulary import Vocabulary
from ..rewards import problems
from ..sequences.padding import check_padding
from ..training.begin import announce, run_to_end
from ..training.same_inputs import require_same
from . import completions
from .completions import Completions
from .options import GrpoSpec
from .reward_log import RewardLog
from .reward_sources import warn_of_changes


def run(spec: GrpoSpec, ctx: Context) -> dict[str, Any]:
    """Train until done or `ctx.stop`; resume from the latest checkpoint when there is one.

    Returns steps, the mean reward on held-out problems before and after (None without any), the
    folder of the model and the metrics of the last step. Raises Stopped and JobFailed.
    """
    from .setup import completions_of, episodes_of, training_of

    checkpoint = ctx.checkpoints.latest()
    begun = time.perf_counter()
    warm = ctx.models.take(spec.model)
    check_can_generate(warm.model)
    parts = spec.parts_by(ctx.rules)
    training_set, held_out = parts.training, parts.held_out
    report_splits(ctx.emit, "dataset", *spec.data_sets, former=parts.readings[0].former)
    for reading in parts.readings:
        report_former(ctx.emit, reading.former)
        report_skipped(ctx.emit, reading)
    if spec.eval_dataset is not None:  # within a data set, prompts are distinct
        seen = {problems.key_of(problem) for problem in training_set}
        num_shared = sum(problems.key_of(problem) in seen for problem in held_out)
        report_shared(ctx.emit, num_shared, len(held_out))
    vocabulary = Vocabulary.of(spec.model, warm.model, warm.tokenizer)
    check_padding(warm)
    data = {
        "data": problems.fingerprint(training_set + held_out),
        "columns": problems.columns_fingerprint(training_set + held_out),
    }
    with ExitStack() as stack:
        if spec.played is None:
            setup = completions_of(spec, ctx, warm, parts, vocabulary, stack)
        else:
            setup = episodes_of(spec, ctx, warm, parts, stack)
        data_done = time.perf_counter()
        task, training = training_of(spec, ctx, warm, setup, data)
        require_same(ctx.ranks, "dataset", {"rows": data["data"], "columns": data["columns"]})
        require_same(ctx.ranks, "reward", setup.sources.digests)
        batch_size, accumulation = spec.geometry
        gemm = announce(
            training,
            checkpoint,
            model=spec.model,
            num_generations=spec.num_generations,
            batch_size=batch_size,
            gradient_accumulation=accumulation,
            max_completion_length=setup.config.max_completion_length,
            pack_tokens=task.scorer.most_tokens,  # per forward pass; None: padded batches
            rollout_dtype=task.groups.sampler.rollout_dtype,
            keeps_completions=kept_completions(spec.log_completions),
            left_out=left_out.of_job("dataset", *spec.data_sets, readings=parts.readings),
            data_s=data_done - begun,
            trainer_s=time.perf_counter() - data_done,
            **setup.about,
        )
        for words in spec.loss_warnings():
            ctx.emit("warning", message=words)
        if warm.appended_end is not None:
            ctx.emit("warning", message=f"model: {appended_end_words(warm.appended_end)}")
        for words in of_rollouts_words(warm.unapplied):
            ctx.emit("warning", message=f"model: {words}")
        steps = spec.steps_total
        if checkpoint is not None and (steps is None or step_of(checkpoint) < steps):
            option = "reward" if spec.played is None else spec.played[0]
            warn_of_changes(ctx, checkpoint, option)
        with (
            _completions(spec, ctx, checkpoint) as task.completions,
            _reward_log(spec, ctx, checkpoint) as task.reward_log,
        ):
            run_to_end(training, checkpoint, gemm)
        journal.remove(ctx.run_dir, training.step)
    before = task.reward_before if training.before is None else training.before["reward"]
    return {
        "steps": training.step,
        "reward_before": before,
        "reward_after": None if training.last_eval is None else training.last_eval["reward"],
        "model": "model",
        "metrics": {k: v for k, v in training.last_metrics.items() if k != "samples"},
        **training.planned,
    }


def kept_completions(every: int) -> dict[str, int] | None:
    """Return what the event `begin` tells of the completions that are kept; None for none."""
    if every == 0:
        return None
    return {"every": every, "latest": completions.LATEST, "most_bytes": completions.MOST_BYTES}


def _completions(
    spec: GrpoSpec, ctx: Context, checkpoint: Path | None
) -> AbstractContextManager[Completions | None]:
    if ctx.ranks.rank > 0:
        return nullcontext()
    step = 0 if checkpoint is None else step_of(checkpoint)
    path, every = ctx.run_dir / completions.FILE, spec.log_completions
    kept = ctx.patiently(lambda: Completions(path, every=every, step=step), ctx.run_dir)
    return closing(kept)


def _reward_log(
    spec: GrpoSpec, ctx: Context, checkpoint: Path | None
) -> AbstractContextManager[RewardLog | None]:
    if spec.reward_log is None or ctx.ranks.rank > 0:
        return nullcontext()
    step = 0 if checkpoint is None else step_of(checkpoint)
    return RewardLog(Path(spec.reward_log), ctx.job_id, step=step)
