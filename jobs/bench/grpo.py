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
from peft import LoraConfig, get_peft_model
from transformers import PrinterCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from ..compute.device import has_bfloat16
from ..compute.frozen_int8 import quantize_linears
from ..grpo.packed_trainer import PackedTrainer
from ..training.reference import weight_sharing_clone
from . import machine, model
from .training import timed
from .works import GRPO, GrpoWork


def run(side: str, work: GrpoWork, folder: Path, steps: int) -> dict[str, Any]:
    """Train and return the measurements (`training.timed`)."""
    return timed(
        side,
        lambda output, _: _trainer(side, work, folder, steps + 1, output),
        lambda _, rates: work.floor_s(work.shape.parameters, rates.flops, rates.bytes_s),
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
    is_ours, adapter = side == "warmd", _adapter(work)
    reference = model.read(folder) if work.beta and adapter is None else None
    # As in a GRPO job: the reference model has the warm weights, the policy shares them.
    is_copy = is_ours and reference is not None
    policy: Any = weight_sharing_clone(reference) if is_copy else model.read(folder)
    if is_ours and work.base_precision == "int8":
        quantize_linears(policy, kept=policy.get_output_embeddings())
    if adapter is None:
        policy.requires_grad_(True)
    elif is_ours:
        policy, adapter = get_peft_model(policy, adapter), None
    else:  # TRL wraps it: a model with an adapter would get a second one as its reference
        config.beta = work.beta
    kind = PackedTrainer if is_ours else GRPOTrainer
    trainer: Any = kind(
        model=policy,
        args=config,
        processing_class=model.tokenizer(work.shape),
        train_dataset=Dataset.from_list(
            [{"prompt": prompt} for prompt in model.prompts(work.shape, work.prompt, steps)]
        ),
        reward_funcs=_rewards,
        peft_config=adapter,
    )
    trainer.remove_callback(PrinterCallback)
    if isinstance(trainer, PackedTrainer):
        trainer.rollout_dtype = work.rollout_dtype
        if work.beta:
            trainer.set_reference(reference, work.beta)
    elif reference is not None:
        config.beta = trainer.beta = work.beta
        add_fused_lm_head(reference, temperature=trainer.temperature)
        trainer.ref_model = reference
    return trainer


def _adapter(work: GrpoWork) -> LoraConfig | None:
    if work.lora is None:
        return None
    return LoraConfig(
        r=work.lora, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def _rewards(completions: Sequence[str], **_: Any) -> list[float | None]:
    """Return a different reward for every completion, so that every one has an advantage."""
    return [float(index) for index, _ in enumerate(completions)]


if __name__ == "__main__":
    side, name, folder, steps = sys.argv[1:]
    torch.manual_seed(0)
    measured = run(side, GRPO[name], Path(folder), int(steps))
    sys.stdout.write(orjson.dumps(measured).decode() + "\n")
