"""GRPO trainers on tiny models, TRL's and warmd's, and what they log."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import tiny
import torch
from datasets import Dataset
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from warmd.jobs.grpo.packed_trainer import PackedTrainer

CLOCK = ("step_time", "runtime", "per_second")


def digits(completions: list[str], **_: Any) -> list[float]:
    return tiny.digit_share([], completions, [])


def trainer(kind: type[GRPOTrainer], folder: Any, model: Any, **options: Any) -> Any:
    """A trainer of 5 steps on a copy of `model`, which is the reference where there is a beta."""
    beta = options.pop("beta", 0.0)
    reward = options.pop("reward", digits)
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        # Plain descent: AdamW divides by the gradient's size, and so makes of a weight that
        # learns nothing but rounding one that moves like the others.
        "optim": "sgd",
        "learning_rate": 0.1,
    }
    config = GRPOConfig(
        output_dir=str(folder),
        max_steps=5,
        bf16=False,
        activation_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        seed=3,
        **usual | options,
    )
    prompts = [{"prompt": f"{number}+{number * 7}="} for number in range(12)]
    made = kind(
        model=copy.deepcopy(model).requires_grad_(True),
        args=config,
        processing_class=tiny.tokenizer(),
        train_dataset=Dataset.from_list(prompts),
        reward_funcs=reward,
    )
    reference = copy.deepcopy(model)
    if beta and isinstance(made, PackedTrainer):
        made.set_reference(reference, beta)
    elif beta:
        config.beta = made.beta = beta
        add_fused_lm_head(reference, temperature=made.temperature)
        made.ref_model = reference
    return made


def train(made: Any) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Train and return what was logged at each step, and the weights."""
    logged: list[dict[str, Any]] = []
    log = made.log

    def keep(logs: dict[str, Any], *rest: Any) -> None:
        log(logs, *rest)
        logged.append({k: v for k, v in logs.items() if not any(word in k for word in CLOCK)})

    made.log = keep
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing", FutureWarning)
        made.train()
    return logged, [weight.detach() for weight in made.model.parameters()]
