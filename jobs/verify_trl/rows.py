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
from ..dpo import dataset as pairs, kind as dpo_kind
from ..dpo.options import DpoSpec
from ..sft import dataset as texts, kind as sft_kind
from ..sft.options import SftSpec
from ..training import row_job
from ..training.row_options import RowTrainingSpec
from ..training.tokens import Examples
from .sides import Recorder, Sides, Stock


def sft(spec: SftSpec, ctx: Context, warm: WarmModel, stack: ExitStack) -> Sides:
    """Prepare both sides of an SFT job."""
    data = row_job.prepare(spec, ctx, warm, sft_kind.tokenization_of, texts.Example)
    _, training = sft_kind.training_of(spec, ctx, replace(data, held_out=data.held_out[:0]))
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

    return Sides(training, trainer, _steps_of_an_epoch(spec, data.examples))


def dpo(spec: DpoSpec, ctx: Context, warm: WarmModel, stack: ExitStack) -> Sides:
    """Prepare both sides of a DPO job."""
    data = row_job.prepare(spec, ctx, warm, dpo_kind.tokenization_of, pairs.Example)
    _, training = dpo_kind.training_of(spec, ctx, replace(data, held_out=data.held_out[:0]))
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

    return Sides(training, trainer, _steps_of_an_epoch(spec, data.examples))


def _in_order(args: Any, stock: Stock) -> Any:
    args.output_dir = str(stock.folder)
    args.train_sampling_strategy = "sequential"
    return args


def _steps_of_an_epoch(spec: RowTrainingSpec, examples: Examples[Any]) -> int:
    return -(-len(examples) // spec.rows_per_step)
