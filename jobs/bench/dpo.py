"""One side of the DPO benchmark: times some steps of TRL's or warmd's trainer.

    python -m warmd.jobs.bench.dpo trl|warmd WORK FOLDER STEPS

FOLDER holds the model (`model.py`), pairs are random tokens. Each side has its own process, so that
its memory can be measured. Prints one JSON object. Imports torch and trl.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import orjson
import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from ..compute.device import has_bfloat16
from ..dpo.dataset import Example
from ..dpo.options import DpoSpec
from ..dpo.task import Preferences
from ..training.arguments import scorer_of
from ..training.reference import weight_sharing_clone
from . import machine, model
from .training import Clock, context, own_loop, timed
from .works import DPO, DpoWork


def run(side: str, work: DpoWork, folder: Path, steps: int) -> dict[str, Any]:
    """Train and return the measurements (`training.timed`)."""
    return timed(
        side,
        lambda output, clock: _trainer(side, work, folder, steps + 1, output, clock),
        lambda parameters, rates: work.floor_s(
            parameters, rates.flops, rates.bytes_s, steps=steps + 1
        ),
    )


def _trainer(side: str, work: DpoWork, folder: Path, steps: int, output: str, clock: Clock) -> Any:
    device = machine.device()
    config = DPOConfig(
        output_dir=output,
        max_steps=steps,
        per_device_train_batch_size=work.pairs,
        max_length=None,
        # TRL's fastest settings on a CPU.
        bf16=has_bfloat16(device),
        activation_checkpointing=False,
        use_cpu=device.type == "cpu",
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    reference = model.read(folder)
    tokenizer, rows = model.tokenizer(work.shape), _rows(work, steps)
    if side == "warmd":
        ctx = context(output, device)
        policy = weight_sharing_clone(reference).requires_grad_(True)
        task = Preferences(
            ctx=ctx,
            args=config,
            model=policy,
            reference=reference,
            scorer=scorer_of(policy, ctx, tokenizer, config, wants_top=True),
            examples=[
                Example(row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]) for row in rows
            ],
            held_out=[],
            data="",
        )
        spec = DpoSpec(save_every="1000000")
        return own_loop(
            *(ctx, spec, config, policy, tokenizer, task, clock), before_update=task.before_update
        )
    trainer = DPOTrainer(
        model=model.read(folder).requires_grad_(True),
        ref_model=reference,
        args=config,
        processing_class=tokenizer,
        # TRL tokenizes what it is made with: the tokens follow.
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
    )
    trainer.train_dataset = Dataset.from_list(rows)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _rows(work: DpoWork, steps: int) -> list[dict[str, list[int]]]:
    """Return pairs of random tokens."""
    draw = random.Random(1)
    return [
        {
            name: [draw.randrange(2, work.shape.vocab_size) for _ in range(length)]
            for name, length in zip(("prompt_ids", "chosen_ids", "rejected_ids"), pair, strict=True)
        }
        for pair in work.lengths(steps)
    ]


if __name__ == "__main__":
    side, name, folder, steps = sys.argv[1:]
    torch.manual_seed(0)
    measured = run(side, DPO[name], Path(folder), int(steps))
    sys.stdout.write(orjson.dumps(measured).decode() + "\n")
