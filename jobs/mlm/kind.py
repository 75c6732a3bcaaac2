"""The MLM kind: masked language modeling on text, or on Python code with its knowledge graph.

`options.py` has its options; `corpus.py` makes the examples, `model.py` the model, and `task.py`
computes the losses.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..codegraph.python_graph import sources_in
from ..context import Context, WarmModel
from ..data import left_out
from ..data.former import Former
from ..data.reader import progress, report_former
from ..errors import JobFailed
from ..models.weight_headers import listed
from ..training.begin import announce, run_to_end
from ..training.same_inputs import require_same
from .options import GRAPH, LEARNING_RATE, MlmSpec

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from ..data.corpus import Corpus
    from ..training.loop import Training
    from .objectives import Objective


def run(spec: MlmSpec, ctx: Context) -> dict[str, Any]:
    """Train until done or `ctx.stop`; resume from the latest checkpoint when there is one.

    Returns steps, the last evaluation (None without any), the folder of the model and the metrics
    of the last step. Raises Stopped and JobFailed.
    """
    from ..data.corpus import tokenizer_digest
    from .model import given_tokenizer, model_to_train, read_tokenizer

    checkpoint = ctx.checkpoints.latest()
    begun = time.perf_counter()
    warm = None if spec.model is None else ctx.models.take(spec.model)
    given = given_tokenizer(spec, warm)
    corpus = ctx.ranks.after_first(lambda: _corpus(spec, ctx, given, checkpoint))
    tokenizer = given or read_tokenizer(corpus.folder / "tokenizer")
    digests = {"content": corpus.name, "tokenizer": tokenizer_digest(tokenizer)}
    require_same(ctx.ranks, "data", digests)
    data_done = time.perf_counter()
    if warm is not None and warm.new_head:
        _announce_head(spec, ctx, warm)
    model = model_to_train(spec, warm, tokenizer, is_trained=given is None, device=ctx.device)
    training = _training(spec, ctx, warm, model, tokenizer, corpus)
    trainer_s = time.perf_counter() - data_done
    steps = spec.steps_total
    gemm = announce(
        training,
        checkpoint,
        micro_steps_total=None if steps is None else steps * spec.gradient_accumulation,
        model=spec.model or spec.architecture,
        objective=spec.objective,
        batch_size=spec.batch_size,
        gradient_accumulation=spec.gradient_accumulation,
        seq_len=spec.seq_len,
        warmup_steps=spec.warmup,
        left_out=_left_out(spec, ctx, corpus),
        data_s=data_done - begun,
        trainer_s=trainer_s,
    )
    run_to_end(training, checkpoint, gemm)
    return {
        "steps": training.step,
        "eval": training.last_eval,
        "model": "model",
        "metrics": training.last_metrics,
        **training.planned,
    }


def _announce_head(spec: MlmSpec, ctx: Context, warm: WarmModel) -> None:
    tensors = f"{len(warm.new_head)} tensors: {listed(warm.new_head)}"
    if spec.lora is not None:
        raise JobFailed(
            f"lora: must be unset for a model without a head for masked tokens ({tensors}): "
            "an adapter does not train a new head"
        )
    ctx.emit(
        "warning",
        message=f"model: {warm.name} has no head for masked tokens, so a new one is trained from "
        f"random values ({tensors})",
    )


# Data.


def _corpus(spec: MlmSpec, ctx: Context, tokenizer: Any | None, checkpoint: Path | None) -> Corpus:
    from ..data.corpus import FOLDER
    from . import corpus as made

    is_graph = spec.objective == GRAPH
    recipe = made.Recipe(
        data=spec.data_path,
        tokenizer=tokenizer,
        vocab_size=spec.vocab_size,
        seq_len=spec.seq_len,
        share=spec.validation,
        held_out_data=None if spec.eval_dataset is None else Path(spec.eval_dataset),
        check_stop=partial(ctx.check_stop, checkpoint),
        report=progress(ctx.emit),
        columns=spec.column_names,
        skip_bad_rows=spec.skip_bad_rows,
        former=Former.of(ctx.rules),
    )
    begun = time.perf_counter()
    build = made.graph_corpus if is_graph else made.text_corpus
    corpus = build(ctx.cache_dir / FOLDER, recipe)
    report_former(ctx.emit, recipe.former)
    ctx.emit(
        "data",
        built=corpus.is_new,
        corpus=corpus.name,
        **corpus.facts,
        examples=len(corpus.train),
        examples_held_out=len(corpus.validation),
        tokens=int(corpus.offsets[-1]),
        seconds=time.perf_counter() - begun,
    )
    per_step = spec.batch_size * spec.gradient_accumulation
    if len(corpus.train) < per_step:
        raise JobFailed(
            f"data: must have at least {per_step} examples to train on, for a step (batch_size x "
            f"gradient_accumulation), got {len(corpus.train)}"
        )
    return corpus


# The training.


def _training(
    spec: MlmSpec,
    ctx: Context,
    warm: WarmModel | None,
    model: Any,
    tokenizer: Any,
    corpus: Corpus,
) -> Training:
    from ..training.loop import Training
    from ..training.lora import with_adapter
    from .masking import Masker
    from .objectives import GraphObjective, TextObjective
    from .task import MaskedModeling, Weights

    masker = Masker(
        seed=spec.seed,
        mask_id=tokenizer.mask_token_id,
        mlm_rate=spec.mlm_rate,
        mnm_rate=spec.mnm_rate,
        is_static=spec.masks == "static",
        random_ids=range(len(tokenizer)) if spec.mask_80_10_10 else None,
    )
    objective: Objective = (
        GraphObjective(masker, has_constraint=spec.constraint_weight > 0)
        if spec.objective == GRAPH
        else TextObjective(model, tokenizer, masker)
    )
    if spec.lora is not None:
        assert warm is not None
        model = with_adapter(warm, model, spec)
    args = _arguments(spec, ctx)
    task = MaskedModeling(
        ctx=ctx,
        args=args,
        model=model,
        corpus=corpus,
        held_out=measured(corpus, spec.validation_examples),
        objective=objective,
        weights=Weights(
            mlm=spec.mlm_weight,
            mnm=spec.mnm_weight,
            mnm_ramp_steps=spec.mnm_ramp_steps,
            constraint=spec.constraint_weight,
        ),
    )
    return Training(
        ctx=ctx,
        spec=spec,
        args=args,
        model=model,
        tokenizer=tokenizer,
        task=task,
        measured=task if len(task.held_out) else None,
        eval_every=spec.eval_every or None,
        eval_first=spec.eval_first,
        on_step=task.trained,
    )


def measured(corpus: Corpus, most: int) -> Any:
    """Return the validation examples: all held-out ones, or `most` evenly spread ones."""
    held_out = corpus.validation
    if most == 0 or most >= len(held_out):
        return held_out
    return held_out[[i * len(held_out) // most for i in range(most)]]


def _arguments(spec: MlmSpec, ctx: Context) -> TrainingArguments:
    from transformers import TrainingArguments

    from ..training.arguments import UNPLANNED, common_arguments
    from ..training.lora import chosen_learning_rate

    return TrainingArguments(
        **common_arguments(spec, ctx),
        max_steps=UNPLANNED if spec.steps_total is None else spec.steps_total,
        per_device_train_batch_size=spec.batch_size,
        gradient_accumulation_steps=spec.gradient_accumulation,
        learning_rate=chosen_learning_rate(spec, ctx, LEARNING_RATE),
        warmup_steps=spec.warmup or 0,
        optim="adamw_torch_fused",
    )


def _left_out(spec: MlmSpec, ctx: Context, corpus: Corpus) -> str | None:
    """Return what of the data is not read; None: all is read."""
    held_out = spec.eval_dataset
    if Former.of(ctx.rules) is not None:
        return None  # other files are left out: `report_former` names them
    if spec.objective != GRAPH:
        files = left_out.of_job("data", str(spec.data_path), held_out, is_text=True)
        return left_out.joined(files, corpus.facts.get("left_out"))
    folders = [spec.data_path, *([] if held_out is None else [Path(held_out)])]
    return left_out.joined(*(left_out.of_files(sources_in("data", path)) for path in folders))
