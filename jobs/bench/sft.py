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
from ..sft.dataset import Example
from ..sft.options import SftSpec
from ..sft.task import Supervised
from ..training.arguments import scorer_of
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
            scorer=scorer_of(policy, ctx, tokenizer, config, wants_top=True),
            examples=records,
            held_out=cast(Any, []),
            data="",
        )
        spec = SftSpec(save_every="1000000")
        return own_loop(ctx, spec, config, policy, tokenizer, task, clock)
    trainer = SFTTrainer(
        model=policy,
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([row.stock() for row in records]),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _records(work: SftWork, steps: int) -> list[Example]:
    """Return tokenized records of random words, of which the completions are learned."""
    draw = random.Random(1)
    found = []
    for prompt, completion in work.lengths(steps):
        ids = [draw.randrange(2, work.shape.vocab_size) for _ in range(prompt + completion)]
        found.append(Example(ids, [0] * prompt + [1] * completion))
    return found


if __name__ == "__main__":
    side, name, folder, steps = sys.argv[1:]
    torch.manual_seed(0)
    measured = run(side, SFT[name], Path(folder), int(steps))
    sys.stdout.write(orjson.dumps(measured).decode() + "\n")
