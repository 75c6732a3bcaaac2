#!/usr/bin/env python3
"""The MLM + MNM job of `micro_steps.py` as a separate script with the stock Trainer.

    cold_mlm.py CACHE OUTPUT MICRO_STEPS ACCUMULATION EVAL_EVERY EVAL_EXAMPLES

CACHE is the folder of a corpus cache in which the job's data is already built, so that its time
does not count. Trains and evaluates on the same examples as the job. Prints a JSON object with the
seconds of its parts to stderr.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import islice
from pathlib import Path

BEGUN = time.perf_counter()


def main() -> None:
    import numpy as np
    import torch
    from transformers import Trainer, TrainingArguments

    from warmd.jobs.codegraph.encoder import CodeGraphConfig, CodeGraphEncoder
    from warmd.jobs.codegraph.sequences import MASK_ID
    from warmd.jobs.mlm.corpus import Recipe, graph_corpus
    from warmd.jobs.mlm.data_order import StepOrder
    from warmd.jobs.mlm.kind import measured
    from warmd.jobs.mlm.masking import Masker
    from warmd.jobs.mlm.objectives import GraphObjective
    from warmd.jobs.mlm.options import LEARNING_RATE, MlmSpec

    imported = time.perf_counter()
    cache, output = map(Path, sys.argv[1:3])
    micro_steps, accumulation, eval_every, eval_examples = map(int, sys.argv[3:])
    num_steps = micro_steps // accumulation
    spec = MlmSpec(
        batch_size=1,
        gradient_accumulation=accumulation,
        steps=num_steps,
        validation_examples=eval_examples,
    )
    recipe = Recipe(
        data=spec.data_path,
        tokenizer=None,
        vocab_size=spec.vocab_size,
        seq_len=spec.seq_len,
        share=spec.validation,
        check_stop=lambda: None,
    )
    corpus = graph_corpus(cache, recipe)
    if corpus.is_new:
        raise SystemExit(f"{cache}: the corpus was not there")
    order = StepOrder(
        corpus.lengths[corpus.train],
        micro_batch=spec.batch_size,
        accumulation=spec.gradient_accumulation,
        seed=spec.seed,
    )
    steps = islice(order.steps_from(0), num_steps)
    train = corpus.train[[index for step in steps for ((_, index),) in step]]
    held_out = measured(corpus, spec.validation_examples)
    data_done = time.perf_counter()
    torch.manual_seed(spec.seed)
    model = CodeGraphEncoder(CodeGraphConfig())
    objective = GraphObjective(Masker(seed=spec.seed, mask_id=MASK_ID), has_constraint=True)

    def examples(numbers: np.ndarray) -> list[dict[str, np.ndarray]]:
        return [objective.mask(corpus.example(int(i)), 0, int(i)) for i in numbers]

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(output),
            max_steps=num_steps,
            per_device_train_batch_size=spec.batch_size,
            gradient_accumulation_steps=spec.gradient_accumulation,
            learning_rate=LEARNING_RATE,
            weight_decay=spec.weight_decay,
            eval_strategy="steps",
            eval_steps=eval_every,
            prediction_loss_only=True,
            save_steps=num_steps,
            report_to=[],
            use_cpu=True,
            logging_steps=1,
            remove_unused_columns=False,
            disable_tqdm=True,
        ),
        train_dataset=examples(train),
        eval_dataset=examples(held_out),
        data_collator=objective.collate,
    )
    trainer_done = time.perf_counter()
    trainer.train()
    trainer.evaluate()
    ended = time.perf_counter()
    parts = {
        "imports": imported - BEGUN,
        "data": data_done - imported,
        "model_and_trainer": trainer_done - data_done,
        "training": ended - trainer_done,
    }
    sys.stderr.write(json.dumps(parts) + "\n")


if __name__ == "__main__":
    main()
