"""Both sides of a job on rows (SFT, DPO): TRL's trainer gets warmd's tokens in warmd's order.

Imports torch and trl.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from datasets import Dataset
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_trainer import SFTTrainer

from ..context import Context, WarmModel
from ..dpo import kind as dpo_kind
from ..dpo.options import DpoSpec
from ..sft import kind as sft_kind
from ..sft.options import SftSpec
from ..training.row_job import Prepared
from .sides import Recorder, Sides, Stock


def sft(spec: SftSpec, ctx: Context, warm: WarmModel, stack: ExitStack) -> Sides:
    """Prepare both sides of an SFT job."""
    data = sft_kind.prepare(spec, ctx, warm)
    _, training = sft_kind.training_of(_without_held_out(data))
    recorder = Recorder(training.task)
    training.task = recorder

    def trainer(stock: Stock) -> Any:
        args = sft_kind.config_of(spec, stock.ctx, stock.warm, data.steps, packs=False)
        learned = [row for batch in recorder.batches_taken for part in batch for row in part.rows]
        return SFTTrainer(
            model=stock.model,
            args=_in_order(args, stock),
            processing_class=stock.warm.tokenizer,
            train_dataset=Dataset.from_list([row.stock() for row in learned]),
            peft_config=stock.lora,
        )

    return Sides(training, trainer, _steps_of_an_epoch(data))


def dpo(spec: DpoSpec, ctx: Context, warm: WarmModel, stack: ExitStack) -> Sides:
    """Prepare both sides of a DPO job."""
    data = dpo_kind.prepare(spec, ctx, warm)
    _, training = dpo_kind.training_of(_without_held_out(data))
    recorder = Recorder(training.task)
    training.task = recorder

    def trainer(stock: Stock) -> Any:
        args = dpo_kind.config_of(spec, stock.ctx, stock.warm, data.steps)
        made = DPOTrainer(
            model=stock.model,
            args=_in_order(args, stock),
            processing_class=stock.warm.tokenizer,
            # TRL tokenizes what it is made with: the tokens follow.
            train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
            peft_config=stock.lora,
        )
        learned = [one for batch in recorder.batches_taken for part in batch for one in part.pairs]
        made.train_dataset = Dataset.from_list(
            [
                {"prompt_ids": one.prompt, "chosen_ids": one.chosen, "rejected_ids": one.rejected}
                for one in learned
            ]
        )
        return made

    return Sides(training, trainer, _steps_of_an_epoch(data))


def _in_order(args: Any, stock: Stock) -> Any:
    args.output_dir = str(stock.folder)
    args.train_sampling_strategy = "sequential"
    return args


def _without_held_out(data: Prepared[Any]) -> Prepared[Any]:
    return replace(data, held_out=data.held_out[:0])


def _steps_of_an_epoch(data: Prepared[Any]) -> int:
    return -(-len(data.examples) // int(data.spec.rows_per_step))
