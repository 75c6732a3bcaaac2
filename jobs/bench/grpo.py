"""One side of the GRPO benchmark: times some steps of TRL's or warmd's trainer.

    python -m warmd.jobs.bench.grpo trl|warmd WORK FOLDER STEPS

FOLDER holds the model (`model.py`); prompts are random words. Each side has its own process, so
that its memory can be measured. Prints one JSON object. Imports torch and trl.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from ..compute.device import has_bfloat16
from ..grpo.packed_trainer import PackedTrainer
from ..training.reference import weight_sharing_clone
from . import machine, model
from .training import timed
from .works import GRPO, GrpoWork


def run(side: str, work: GrpoWork, folder: Path, steps: int) -> dict[str, Any]:
    """Train and return the measurements (`training.timed`)."""
    return timed(
        side,
        lambda output: _trainer(side, work, folder, steps + 1, output),
        lambda parameters, rates: work.floor_s(parameters, rates.flops, rates.bytes_s),
    )


def _trainer(side: str, work: GrpoWork, folder: Path, steps: int, output: str) -> Any:
    device = machine.device()
    config = GRPOConfig(
        output_dir=output,
        max_steps=steps,
        per_device_train_batch_size=work.generations // work.accumulation,
        gradient_accumulation_steps=work.accumulation,
        num_generations=work.generations,
        max_completion_length=work.completion,
        temperature=0.7,
        top_p=0.9,
        loss_type="bnpo",
        learning_rate=2e-6,
        # TRL's fastest settings on a CPU: its defaults are three times slower.
        bf16=has_bfloat16(device),
        activation_checkpointing=False,
        use_cpu=device.type == "cpu",
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    reference = model.read(folder) if work.beta else None
    # As in a GRPO job: the reference model has the warm weights, the policy shares them.
    is_copy = side == "warmd" and reference is not None
    policy: Any = weight_sharing_clone(reference) if is_copy else model.read(folder)
    kind = PackedTrainer if side == "warmd" else GRPOTrainer
    trainer: Any = kind(
        model=policy.requires_grad_(True),
        args=config,
        processing_class=model.tokenizer(work.shape),
        train_dataset=Dataset.from_list(
            [{"prompt": prompt} for prompt in model.prompts(work.shape, work.prompt, steps)]
        ),
        reward_funcs=_rewards,
    )
    trainer.remove_callback(PrinterCallback)
    if isinstance(trainer, PackedTrainer):
        trainer.rollout_dtype = work.rollout_dtype
        if reference is not None:
            trainer.set_reference(reference, work.beta)
    elif reference is not None:
        config.beta = trainer.beta = work.beta
        add_fused_lm_head(reference, temperature=trainer.temperature)
        trainer.ref_model = reference
    return trainer


def _rewards(completions: Sequence[str], **_: Any) -> list[float | None]:
    """Return a different reward for every completion, so that every one has an advantage."""
    return [float(index) for index, _ in enumerate(completions)]


if __name__ == "__main__":
    side, name, folder, steps = sys.argv[1:]
    torch.manual_seed(0)
    measured = run(side, GRPO[name], Path(folder), int(steps))
    sys.stdout.write(orjson.dumps(measured).decode() + "\n")
