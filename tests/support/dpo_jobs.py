"""DPO jobs that take a second: pairs in files, tiny models, and trainers of TRL's and warmd's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import sft_jobs
from datasets import Dataset
from sft_jobs import message, write
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from warmd.jobs.dpo.dataset import Example, Tokenization
from warmd.jobs.dpo.options import DpoSpec
from warmd.jobs.dpo.task import Preferences
from warmd.jobs.training.arguments import KEPT_ACTIVATIONS
from warmd.jobs.training.loop import Training
from warmd.jobs.training.lora import without_dropout
from warmd.jobs.training.reference import weight_sharing_clone


def _turns(number: int) -> list[dict[str, str]]:
    return sft_jobs.turns(number)[:3]


ROWS: dict[str, list[dict[str, Any]]] = {
    "texts": [
        {
            "prompt": f"{n // 2}+{n // 2 * 7}=",
            "chosen": str(n // 2 * 8) * (1 + n % 3),
            "rejected": f"{n} or so" + "?" * (n % 4),
        }
        for n in range(14)
    ],
    "chats": [
        {
            "prompt": _turns(n),
            "chosen": [message("assistant", f"{2 * n + 1}, of course" * (1 + n % 2))],
            "rejected": [message("assistant", "no" * (1 + n % 3))],
        }
        for n in range(14)
    ],
    # Cut to 5 tokens, completions have one token, and half of the pairs of `equal` are the same.
    "one token": [
        {"prompt": f"{n % 5}+1=", "chosen": str(n % 7), "rejected": "no"} for n in range(14)
    ],
    "equal": [
        {"prompt": f"{n % 5}+1=", "chosen": "yes", "rejected": "yell" if n % 2 else "no"}
        for n in range(14)
    ],
    "long prompts": [
        {"prompt": row["prompt"], "chosen": "yes", "rejected": "no"}
        for row in sft_jobs.ROWS["long prompts"]
    ],
    "no prompt": [
        {"prompt": "", "chosen": str(n) * (1 + n % 3), "rejected": "no" * (n % 2 + 1)}
        for n in range(14)
    ],
}


def spec(folder: Path, form: str = "texts", **options: Any) -> DpoSpec:
    """A job of a few steps of a tiny model on short pairs."""
    small = {
        "dataset": write(folder / "rows.jsonl", ROWS[form]),
        "batch_size": 2,
        "learning_rate": 1e-2,
        "save_every": 3,
        "keep": 100,
    }
    return DpoSpec.parse(small | options).located(folder)


class Stock(sft_jobs.InOrder, DPOTrainer):
    pass


def trainer(
    side: str,
    folder: Path,
    model: Any,
    form: str = "texts",
    *,
    max_length: int | None = None,
    **options: Any,
) -> Any:
    """A trainer of 5 steps on a copy of `model`: TRL's on rows, warmd's on its own tokens.

    `lora`: the config of an adapter to train.
    """
    lora = options.pop("lora", None)
    # Plain descent: AdamW makes of a weight that learns nothing but rounding one that moves.
    usual: dict[str, Any] = {
        "max_steps": 5,
        "per_device_train_batch_size": 4,
        "optim": "sgd",
        "learning_rate": 0.1,
    }
    config = DPOConfig(
        output_dir=str(folder),
        max_length=None if side == "warmd" else max_length,
        bf16=False,
        **KEPT_ACTIVATIONS,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        seed=3,
        **usual | options,
    )
    reference = copy.deepcopy(model)
    copied = weight_sharing_clone(reference) if side == "warmd" else copy.deepcopy(model)
    learner = copied.requires_grad_(True)
    if lora is not None:
        reference, learner = None, sft_jobs.with_adapter(learner, lora, config.seed)
    if side == "warmd":
        return _training(folder, learner, reference, form, max_length or 1024, config)
    return Stock(
        model=learner,
        ref_model=reference,
        args=config,
        processing_class=sft_jobs.tokenizer(),
        train_dataset=Dataset.from_list(ROWS[form]),
    )


def _training(
    folder: Path, model: Any, reference: Any, form: str, max_length: int, config: Any
) -> Training:
    how = Tokenization(tokenizer=sft_jobs.tokenizer(), max_length=max_length)
    job = spec(folder, form, save_every=1000)
    for one in (model, reference):
        if one is not None:
            without_dropout(one)
    parts = sft_jobs.parts_of(folder, model, job, how, Example, config)
    task = Preferences(reference=reference, **parts.of_task)
    return parts.training(task, how.tokenizer, before_update=task.before_update)
