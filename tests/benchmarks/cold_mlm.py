#!/usr/bin/env python3
"""The MLM + MNM job of `micro_steps.py` as a script of its own, with the stock Trainer.

    cold_mlm.py CACHE OUTPUT MICRO_STEPS ACCUMULATION EVAL_EVERY EVAL_EXAMPLES

CACHE is the folder of a corpus cache in which the job's data is already built, so that the script
does not pay for it; learns from the very examples that the job does, and is measured on the same.
Prints a JSON object with the seconds of its parts to stderr.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import time
from pathlib import Path

BEGUN = time.perf_counter()


def main() -> None:
    import numpy as np
    import torch
    from transformers import Trainer, TrainingArguments

    from warmd.jobs.chains import MASK_ID
    from warmd.jobs.corpus import Recipe, graph_corpus
    from warmd.jobs.encoder import CodeGraphConfig, CodeGraphEncoder
    from warmd.jobs.masks import Masker
    from warmd.jobs.mlm_objectives import GraphObjective
    from warmd.jobs.mlm_trainer import StepOrder

    imported = time.perf_counter()
    cache, output = map(Path, sys.argv[1:3])
    micro_steps, accumulation, eval_every, eval_examples = map(int, sys.argv[3:])
    recipe = Recipe(
        data=Path(sysconfig.get_path("stdlib")),
        tokenizer=None,
        vocab_size=8000,
        seq_len=128,
        share=0.05,
        heed=lambda: None,
    )
    corpus = graph_corpus(cache, recipe)
    if corpus.is_new:
        raise SystemExit(f"{cache}: the corpus was not there")
    order = StepOrder(
        corpus.lengths[corpus.train],
        micro_batch=1,
        accumulation=accumulation,
        steps=micro_steps // accumulation,
        seed=42,
    )
    train = corpus.train[[index for ((_, index),) in order]]
    held_out = corpus.validation
    held_out = held_out[[i * len(held_out) // eval_examples for i in range(eval_examples)]]
    data_done = time.perf_counter()
    torch.manual_seed(42)
    model = CodeGraphEncoder(CodeGraphConfig())
    objective = GraphObjective(Masker(seed=42, mask_id=MASK_ID), has_constraint=True)

    def examples(numbers: np.ndarray) -> list[dict[str, np.ndarray]]:
        return [objective.mask(corpus.example(int(i)), 0, int(i)) for i in numbers]

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(output),
            max_steps=micro_steps // accumulation,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=accumulation,
            learning_rate=2.5e-4,
            weight_decay=0.01,
            eval_strategy="steps",
            eval_steps=eval_every,
            prediction_loss_only=True,
            save_steps=micro_steps // accumulation,
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
