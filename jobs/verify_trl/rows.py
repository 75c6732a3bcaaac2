"""Both sides of a job on rows (SFT, DPO): TRL's trainer gets warmd's tokens in warmd's order.

Imports torch and trl.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from datasets import Dataset
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_trainer import SFTTrainer

from ..context import Context, WarmModel
from ..dpo import dataset as pairs, kind as dpo_kind
from ..dpo.options import DpoSpec
from ..models.architectures import check_can_generate
from ..sequences.padding import check_padding
from ..sft import dataset as texts, kind as sft_kind
from ..sft.options import SftSpec
from ..training import row_job
from ..training.lengths import most_tokens_of_a_row
from ..training.row_options import RowTrainingSpec
from ..training.tokens import Examples
from .sides import Recorder, Sides, Stock


def sft(spec: SftSpec, ctx: Context, warm: WarmModel, stack: ExitStack) -> Sides:
    """Prepare both sides of an SFT job."""
    check_can_generate(warm.model)
    rows = row_job.load_rows(spec, ctx)
    how = sft_kind.tokenization_of(spec, warm, rows.has_chats)
    check_padding(warm)
    examples, held_out = row_job.encode(spec, ctx, rows, how, warm, texts.Example, None)
    steps = row_job.planned_steps(spec, ctx, examples, None)
    _, training = sft_kind.training_of(
        spec, ctx, warm, steps, examples, held_out[:0], rows.fingerprint
    )
    recorder = Recorder(training.task)
    training.task = recorder

    def trainer(stock: Stock) -> Any:
        args = sft_kind.config_of(spec, stock.ctx, stock.warm, steps, packs=False)
        learned = [row for batch in recorder.batches_taken for part in batch for row in part.rows]
        return SFTTrainer(
            model=stock.model,
            args=_in_order(args, stock),
            processing_class=stock.warm.tokenizer,
            train_dataset=Dataset.from_list([row.stock() for row in learned]),
            peft_config=stock.lora,
        )

    return Sides(training, trainer, _steps_of_an_epoch(spec, examples))


def dpo(spec: DpoSpec, ctx: Context, warm: WarmModel, stack: ExitStack) -> Sides:
    """Prepare both sides of a DPO job."""
    check_can_generate(warm.model)
    rows = row_job.load_rows(spec, ctx)
    how = pairs.Tokenization(
        tokenizer=warm.tokenizer,
        max_length=most_tokens_of_a_row(spec.max_length, warm.model, spec.model),
    )
    check_padding(warm)
    examples, held_out = row_job.encode(spec, ctx, rows, how, warm, pairs.Example, None)
    steps = row_job.planned_steps(spec, ctx, examples, None)
    _, training = dpo_kind.training_of(
        spec, ctx, warm, steps, examples, held_out[:0], rows.fingerprint
    )
    recorder = Recorder(training.task)
    training.task = recorder

    def trainer(stock: Stock) -> Any:
        args = dpo_kind.config_of(spec, stock.ctx, stock.warm, steps)
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

    return Sides(training, trainer, _steps_of_an_epoch(spec, examples))


def _in_order(args: Any, stock: Stock) -> Any:
    args.output_dir = str(stock.folder)
    args.train_sampling_strategy = "sequential"
    return args


def _steps_of_an_epoch(spec: RowTrainingSpec, examples: Examples[Any]) -> int:
    return -(-len(examples) // spec.rows_per_step)
