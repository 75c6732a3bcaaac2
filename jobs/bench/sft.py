"""One side of the SFT benchmark: some steps of one trainer on made-up rows, timed.

    python -m warmd.jobs.bench.sft trl|warmd WORK FOLDER STEPS

FOLDER holds the model (`model.py`), the rows are random words. Each side runs in a process of its
own, so that neither has the other's memory. Prints one JSON object. Imports torch and trl.
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
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from ..sft.dataset import IGNORED
from ..sft.packed_trainer import PackedSftTrainer
from . import model
from .training import timed
from .works import SFT, SftWork


def run(side: str, work: SftWork, folder: Path, steps: int) -> dict[str, Any]:
    """Train and return the measurements (`training.timed`)."""
    return timed(
        side,
        lambda output: _trainer(side, work, folder, steps + 1, output),
        lambda parameters, rates: work.floor_s(
            parameters, rates.flops, rates.bytes_s, steps=steps + 1
        ),
    )


def _trainer(side: str, work: SftWork, folder: Path, steps: int, output: str) -> Any:
    config = SFTConfig(
        output_dir=output,
        max_steps=steps,
        per_device_train_batch_size=work.rows,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        learning_rate=2e-5,
        # TRL's own defaults are slower on a CPU: this is its best.
        bf16=False,
        activation_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    kind: Any = PackedSftTrainer if side == "warmd" else SFTTrainer
    trainer = kind(
        model=model.read(folder).requires_grad_(True),
        args=config,
        processing_class=model.tokenizer(work.shape),
        train_dataset=Dataset.from_list(_rows(work, steps)),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _rows(work: SftWork, steps: int) -> list[dict[str, list[int]]]:
    """Make up the tokens of every row, learned after its prompt."""
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
