"""Both sides of a job on rows (SFT, DPO): TRL's trainer gets warmd's tokens in warmd's order.

Imports torch and trl.
"""

from __future__ import annotations

from collections.abc import Callable
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
from ..training.loop import Training
from ..training.row_job import Prepared
from .sides import Recorder, Sides, Stock


def sft(spec: SftSpec, ctx: Context, warm: WarmModel, stack: ExitStack) -> Sides:
    """Prepare both sides of an SFT job."""
    data = sft_kind.prepare(spec, ctx, warm)

    def trainer(stock: Stock, rows: list[dict[str, Any]]) -> Any:
        args = sft_kind.config_of(spec, stock.ctx, stock.warm, data.steps, packs=False)
        return SFTTrainer(
            model=stock.model,
            args=_in_order(args, stock),
            processing_class=stock.warm.tokenizer,
            train_dataset=Dataset.from_list(rows),
            peft_config=stock.lora,
        )

    return _sides(data, sft_kind.training_of, trainer)


def dpo(spec: DpoSpec, ctx: Context, warm: WarmModel, stack: ExitStack) -> Sides:
    """Prepare both sides of a DPO job."""
    data = dpo_kind.prepare(spec, ctx, warm)

    def trainer(stock: Stock, rows: list[dict[str, Any]]) -> Any:
        made = DPOTrainer(
            model=stock.model,
            args=_in_order(dpo_kind.config_of(spec, stock.ctx, stock.warm, data.steps), stock),
            processing_class=stock.warm.tokenizer,
            # TRL tokenizes what it is made with: the tokens follow.
            train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
            peft_config=stock.lora,
        )
        made.train_dataset = Dataset.from_list(rows)
        return made

    return _sides(data, dpo_kind.training_of, trainer)


def _sides(
    data: Prepared[Any],
    training_of: Callable[[Prepared[Any]], tuple[Any, Training]],
    trainer: Callable[[Stock, list[dict[str, Any]]], Any],
) -> Sides:
    """Return both sides; `trainer` gets the rows that warmd's side has learned, in their order."""
    _, training = training_of(replace(data, held_out=data.held_out[:0]))
    recorder = Recorder(training.task)
    training.task = recorder

    def stock_trainer(stock: Stock) -> Any:
        parts = (part for batch in recorder.batches_taken for part in batch)
        return trainer(stock, [row.stock() for part in parts for row in part.rows])

    return Sides(training, stock_trainer, -(-len(data.examples) // int(data.spec.rows_per_step)))


def _in_order(args: Any, stock: Stock) -> Any:
    args.output_dir = str(stock.folder)
    args.train_sampling_strategy = "sequential"
    return args
