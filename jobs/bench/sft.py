"""One side of the SFT benchmark: times some steps of TRL's or warmd's trainer.

    python -m warmd.jobs.bench.sft trl|warmd WORK FOLDER STEPS

FOLDER holds the model (`model.py`); records are random words. Each side has its own process, so
that its memory can be measured. Prints one JSON object. Imports torch and trl.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any, cast

import orjson
import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from ..compute.device import has_bfloat16
from ..sequences.passes import pack_tokens
from ..sft.dataset import IGNORED, Example
from ..sft.options import SftSpec
from ..sft.task import Supervised
from ..training.arguments import pad_id
from . import machine, model
from .training import Clock, context, own_loop, timed
from .works import SFT, SftWork


def run(side: str, work: SftWork, folder: Path, steps: int) -> dict[str, Any]:
    """Train and return the measurements (`training.timed`)."""
    return timed(
        side,
        lambda output, clock: _trainer(side, work, folder, steps + 1, output, clock),
        lambda parameters, rates: work.floor_s(
            parameters, rates.flops, rates.bytes_s, steps=steps + 1
        ),
    )


def _trainer(side: str, work: SftWork, folder: Path, steps: int, output: str, clock: Clock) -> Any:
    device = machine.device()
    config = SFTConfig(
        output_dir=output,
        max_steps=steps,
        per_device_train_batch_size=work.batch_size,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        learning_rate=2e-5,
        # TRL's fastest settings on a CPU.
        bf16=has_bfloat16(device),
        activation_checkpointing=False,
        use_cpu=device.type == "cpu",
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    policy, tokenizer = model.read(folder).requires_grad_(True), model.tokenizer(work.shape)
    records = _records(work, steps)
    if side == "warmd":
        ctx = context(output, device)
        task = Supervised(
            ctx=ctx,
            args=config,
            model=policy,
            pad_id=pad_id(policy, tokenizer),
            examples=[Example(row["input_ids"], row["labels"]) for row in records],
            held_out=cast(Any, []),
            data="",
            most_tokens=pack_tokens(policy, ctx),
        )
        spec = SftSpec(save_every="1000000")
        return own_loop(ctx, spec, config, policy, tokenizer, task, clock)
    trainer = SFTTrainer(
        model=policy,
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(records),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _records(work: SftWork, steps: int) -> list[dict[str, list[int]]]:
    """Return tokenized records of random words, with labels for the completions only."""
    draw = random.Random(1)
    found = []
    for prompt, completion in work.lengths(steps):
        ids = [draw.randrange(2, work.shape.vocab_size) for _ in range(prompt + completion)]
        found.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
    return found


if __name__ == "__main__":
    side, name, folder, steps = sys.argv[1:]
    torch.manual_seed(0)
    measured = run(side, SFT[name], Path(folder), int(steps))
    sys.stdout.write(orjson.dumps(measured).decode() + "\n")
